"""Kinds of masks to try a decoder with.

Shapes: B images, N patches.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mae_vit.keyed import SampleKeys
from mae_vit.masking import patch_ranks

MaskKind = Literal["random", "block", "grid"]
MASK_KINDS: tuple[MaskKind, ...] = ("random", "block", "grid")


def mask_ranks(kind: MaskKind, keys: SampleKeys, grid_size: tuple[int, int]) -> Tensor:
    """Ranks patches for `mae_vit.masking.random_masking`, which keeps the lowest (MAE Fig. 6).

    Args:
        kind: "random" as in training; "block" hides a square around the middle; "grid" leaves
            a regular lattice.
        keys: of the images, for "random".
        grid_size: rows and columns of patches.

    Returns:
        int64 (B, N), distinct within a row.
    """
    rows, columns = grid_size
    num_patches, images = rows * columns, len(keys.index)
    if kind == "random":
        return patch_ranks(keys, num_patches)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    if kind == "block":
        # Far from the middle is visible; as shares of the image, so that the block has its shape.
        off = torch.stack([((row + 0.5) / rows - 0.5).abs(), ((column + 0.5) / columns - 0.5).abs()])
        order = (-off.max(dim=0).values * 2 * num_patches).round().long() + num_patches
    else:
        order = _bayer(max(rows, columns))[row, column]
    ranks = order.flatten() * num_patches + torch.arange(num_patches)
    return ranks.expand(images, -1).to(keys.index.device)


def _bayer(size: int) -> Tensor:
    """The ordered-dithering matrix: its lowest values are always spread evenly."""
    matrix = torch.zeros(1, 1, dtype=torch.int64)
    while len(matrix) < size:
        matrix = torch.cat(
            [
                torch.cat([4 * matrix, 4 * matrix + 2], dim=1),
                torch.cat([4 * matrix + 3, 4 * matrix + 1], dim=1),
            ]
        )
    return matrix
