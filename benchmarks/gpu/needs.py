"""What the parts import, looked up before anything is measured: one message names all that is missing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from mae_vit.core.errors import InputError

# The project's own dependencies (a test compares them with pyproject.toml).
PROJECT = (
    *(
        "torch",
        "torchvision",
        "timm",
        "webdataset",
        "deepspeed",
        "tensorboard",
        "numpy",
        "pillow",
        "simplejpeg",
    ),
    *(
        "pydantic",
        "ruamel.yaml",
        "safetensors",
        "filelock",
        "fsspec",
        "psutil",
        "tqdm",
        "scikit-learn",
        "matplotlib",
        "scipy",
    ),
)
# What single parts need beside them.
OF_PARTS = {"rates": ("transformers",), "tests": ("pytest", "pytest-timeout", "pytest-xdist")}
# Comes whole or not at all, and names libraries of the vendor that installations replace.
_WHOLE = ("torch", "torchvision")


def check_needs(parts: Iterable[str]) -> None:
    """Makes sure that all distributions are there which some parts need, with what these need themselves.

    Raises:
        InputError: naming all that are missing.
    """
    wanted = [*PROJECT, *(name for part in parts for name in OF_PARTS.get(part, ()))]
    missing = find_missing(wanted)
    if missing:
        raise InputError(
            f"not installed here: {', '.join(missing)}. With a network: pip install {' '.join(missing)}. "
            "Without one: docs/performance.md says how to bring wheels along"
        )


def find_missing(wanted: Iterable[str]) -> list[str]:
    """Names the distributions, wanted or needed by those that are there, which are not installed."""
    # Itself needed by deepspeed and others: where it is not there, no more can be said.
    try:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name
    except ImportError:
        return ["packaging"]
    waiting, seen, missing = [Requirement(name) for name in wanted], set(), set()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = metadata.requires(need.name) or []
        except metadata.PackageNotFoundError:
            missing.add(name)
            continue
        if name not in _WHOLE:
            further = [Requirement(text) for text in needs]
            waiting += [one for one in further if one.marker is None or one.marker.evaluate({"extra": ""})]
    return sorted(missing)
