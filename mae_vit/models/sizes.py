"""Sizes of encoders, names of other choices, numbers of patches. Importing this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Networks of `mae_vit.models.encoders.baselines`.
BASELINE_NAMES = ("SimpleCNN", "SmallResNet", "SmallBiT")
WITHOUT_DROP_PATH = ("SimpleCNN", "SmallResNet")
# Prefix of timm's architectures and pretrained weights.
TIMM_PREFIX = "timm:"
PositionKind = Literal["learnable", "sincos"]
Pool = Literal["cls", "mean"]


@dataclass(frozen=True)
class Size:
    """Width and depth of an encoder; patch size and image size are separate options."""

    embed_dim: int
    depth: int
    num_heads: int


# ViT Table 1 (B, L, H); DeiT Table 1 (Ti, S); "tiny-cifar" has 1.2 M parameters, for small-data CIFAR
# experiments (32 px, patch 4).
SIZES = {
    "tiny-cifar": Size(128, 6, 4),
    "Ti": Size(192, 12, 3),
    "S": Size(384, 12, 6),
    "B": Size(768, 12, 12),
    "L": Size(1024, 24, 16),
    "H": Size(1280, 32, 16),
}


def num_masked_patches(num_patches: int, mask_ratio: float) -> int:
    """Returns N - int(N * (1 - mask_ratio)), as the official MAE code rounds."""
    return num_patches - int(num_patches * (1 - mask_ratio))


def count_units(grid_size: tuple[int, int], mask_unit: int) -> int:
    """Returns U, the number of squares of `mask_unit` x `mask_unit` patches in an image.

    Raises ValueError if the squares do not fill the grid; the message begins with the key.
    """
    rows, columns = grid_size
    if rows % mask_unit or columns % mask_unit:
        raise ValueError(f"mask_unit={mask_unit} does not divide the {rows} x {columns} patches of an image")
    return rows * columns // mask_unit**2
