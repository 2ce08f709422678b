"""What features are of: kept with them, and compared before more are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mae_vit.core import __version__
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.weights.embed.features import Settings
from mae_vit.weights.embed.images import Images
from mae_vit.weights.encoder import PretrainedEncoder

# What the user chose -> the facts that tell it.
_START = ("digest", "mean", "std")
_DATA = ("data_fingerprint", "data_images")
_OPTIONS = {"--img-size": "img_size", "--pool": "pool", "--precision": "precision", "--dtype": "dtype"}


def make_facts(encoder: PretrainedEncoder, images: Images, settings: Settings) -> dict[str, Any]:
    """Tells an encoder, what it is used on and how, as JSON."""
    info = encoder.info
    return {
        "tool": f"mae-vit {__version__}",
        "start": encoder.start.source,
        "digest": encoder.start.digest,
        "objective": info.objective,
        "step": info.step,
        "pool": encoder.pool,
        "img_size": list(info.img_size),
        "patch_size": info.patch_size,
        "embed_dim": encoder.embed_dim,
        "mean": list(info.mean),
        "std": list(info.std),
        "precision": settings.precision,
        "dtype": settings.dtype,
        "data": images.name,
        "data_images": len(images),
        "data_fingerprint": images.fingerprint,
        "labels": bool((images.labels >= 0).any()),
    }


def check_same_features(found: dict[str, Any], facts: dict[str, Any], *, where: Path) -> None:
    """Compares what features were made of with what is asked for.

    Raises:
        InputError: naming what differs.
    """
    told = []
    if any(found.get(key) != facts[key] for key in _START):
        own = found.get("start")
        told.append(f"START was {own}" + (" with other weights" if own == facts["start"] else ""))
    if any(found.get(key) != facts[key] for key in _DATA):
        told.append(
            f"DATA was {found.get('data')} as it was, {count_of(found.get('data_images', 0), 'image')}"
        )
    elif found.get("labels") != facts["labels"]:
        told.append(f"DATA was taken {'with' if found.get('labels') else 'without'} labels")
    for option, key in _OPTIONS.items():
        if found.get(key) != facts[key]:
            told.append(f"{option} was {_shown(found.get(key))}, not {_shown(facts[key])}")
    if told:
        raise InputError(
            f"{where} was made otherwise: {'; '.join(told)}: --restart begins again, another --out keeps it"
        )


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)
