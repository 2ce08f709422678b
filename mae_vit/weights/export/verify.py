"""Whether an export computes what ours does: the same images through both."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.weights.export.network import ExportSource

# float32 of two implementations of the same network differ by some 1e-6.
TOLERANCE = 1e-4
# Not the number that programs are traced with: their batch axis must be free.
_IMAGES = 3


@dataclass(frozen=True)
class Verification:
    """What an export was found to be.

    Attributes:
        by: the library that loaded it, with its version.
        what: was compared.
        difference: the largest absolute one.
        code: Python that uses it, run in its folder: defines `model` and what `what` names.
        summary: of the code, one line.
        notes: what a user should know, a sentence each.
    """

    by: str
    what: str
    difference: float
    code: str
    summary: str
    notes: tuple[str, ...] = ()


def random_images(handed: ExportSource) -> Tensor:
    """The same normalized random images at every call: float32 (3, C, H, W)."""
    return torch.randn(_IMAGES, *handed.image_shape(), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def expected(handed: ExportSource) -> Tensor:
    """What ours computes of `random_images`: (3, D) or (3, K)."""
    return handed.network(random_images(handed))


def largest_difference(ours: Tensor, theirs: Tensor, what: str) -> float:
    """Compares two outputs.

    Raises:
        InputError: if they differ by more than `TOLERANCE`, or are not finite.
    """
    if ours.shape != theirs.shape:
        raise InputError(
            f"{what} are {list(theirs.shape)} there, {list(ours.shape)} here: nothing was written"
        )
    difference = (ours - theirs).abs().max().item()
    # Not a number is no agreement.
    if not difference <= TOLERANCE:
        raise InputError(
            f"{what} differ by {difference:.3g} from ours (at most {TOLERANCE:g}): nothing was written"
        )
    return difference


def library(name: str, extra: str) -> ModuleType:
    """Imports an optional library.

    Args:
        name: of the module.
        extra: of this package, that brings it.

    Raises:
        InputError: if it is not installed, with what installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise InputError(f'{missing} is not installed: pip install "mae-vit[{extra}]"') from None
