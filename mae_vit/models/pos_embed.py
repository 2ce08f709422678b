"""Fixed position tables.

Shapes: N patches, k class tokens, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sincos_position_table(grid_size: tuple[int, int], embed_dim: int, class_tokens: int = 1) -> Tensor:
    """Builds the fixed 2-D table of the official MAE code: float32 (1, k + N, D), D divisible by 4.

    The first half of the channels encodes the column and the second half the row, each as sines, then
    cosines. The first k rows, for the class tokens, are zero. Raises ValueError if 4 does not divide D.
    """
    if embed_dim % 4:
        raise ValueError(f"sincos positions need a width divisible by 4, not {embed_dim}")
    frequencies = 1.0 / 10000 ** (np.arange(embed_dim // 4, dtype=np.float64) / (embed_dim / 4))
    rows, columns = np.meshgrid(np.arange(grid_size[0]), np.arange(grid_size[1]), indexing="ij")
    halves = []
    for places in (columns, rows):
        angles = places.reshape(-1, 1).astype(np.float64) * frequencies  # (N, D / 4)
        halves += [np.sin(angles), np.cos(angles)]
    table = np.concatenate(halves, axis=1)  # (N, D)
    table = np.concatenate([np.zeros((class_tokens, embed_dim)), table])  # (k + N, D)
    return torch.from_numpy(table).float()[None]
