"""Numbers of masked patches; in its own module, so that config checks do not import torch."""

from __future__ import annotations


def num_masked_patches(num_patches: int, mask_ratio: float) -> int:
    """Returns N - int(N * (1 - mask_ratio)), as the official MAE code rounds."""
    return num_patches - int(num_patches * (1 - mask_ratio))


def count_units(grid_size: tuple[int, int], mask_unit: int) -> int:
    """Returns U, the number of squares of `mask_unit` x `mask_unit` patches in an image.

    Raises:
        ValueError: if the squares do not fill the grid; the message begins with the key.
    """
    rows, columns = grid_size
    if rows % mask_unit or columns % mask_unit:
        raise ValueError(f"mask_unit={mask_unit} does not divide the {rows} x {columns} patches of an image")
    return rows * columns // mask_unit**2
