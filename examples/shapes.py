"""A data set of one's own, read by number: squares and discs, which are drawn when they are read.

    mae-vit pretrain mae_digits 'run.plugins=[examples/shapes.py]' data.path=shapes run.name=shapes

A file of images (HDF5, LMDB, a memory map) is read the same way. Open it in `read`: processes that load data get a
pickled copy of the source.
"""

from __future__ import annotations

import numpy as np

from mae_vit.data.map_source import MapSource, register_source

SIZE = 8


class Shapes(MapSource):
    """Gray images of a bright shape: class 0 is a square, class 1 a disc."""

    height = width = (SIZE, SIZE)

    def __init__(self, first: int, count: int) -> None:
        """Draws the shapes first..first+count-1."""
        self.first, self.fingerprint = first, f"shapes {first}"
        self.labels = np.arange(count) % 2

    def read(self, sample: int) -> np.ndarray:
        """Returns uint8 (1, H, W), which depends on the number alone."""
        rng = np.random.default_rng(self.first + sample)
        top, left, radius = rng.uniform((2, 2, 1), (SIZE - 3, SIZE - 3, 3))
        rows, columns = np.abs(np.arange(SIZE) - top)[:, None], np.abs(np.arange(SIZE) - left)
        inside = (
            np.maximum(rows, columns) < radius
            if self.labels[sample] == 0
            else np.hypot(rows, columns) < radius
        )
        return (rng.integers(0, 64, (1, SIZE, SIZE)) + 160 * inside).astype(np.uint8)


register_source(
    "shapes",
    {"train": lambda: Shapes(0, 1000), "test": lambda: Shapes(1000, 200)},
    classes=["square", "disc"],
    mean=[0.3],
    std=[0.25],
)
