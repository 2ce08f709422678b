"""Reads an image of bands, whatever its format."""

from __future__ import annotations

import numpy as np

from mae_vit.core.bands import Bands
from mae_vit.data.images.bands.dicom import is_dicom, open_dicom
from mae_vit.data.images.bands.numpy_files import NPY_MAGIC, NPZ_MAGIC, open_npy, open_npz
from mae_vit.data.images.bands.png import PNG_MAGIC, is_deep, open_png
from mae_vit.data.images.bands.tiff import is_tiff, open_tiff
from mae_vit.data.images.bounds import DecodeError, Raster


def open_raster(data: bytes, *, max_pixels: int | None = None, every_band: bool = False) -> Raster | None:
    """Decodes an image other than a photograph of 8 bits.

    Args:
        data: an encoded image; its bytes, not its name, determine the format.
        max_pixels: largest height x width, and a third of the largest size in bytes; `MAX_PIXELS` if None.
        every_band: read TIFF files of 8 bits too, with their bands of transparency.

    Returns:
        The image; None if `mae_vit.data.images.decode` is to decode it.

    Raises:
        DecodeError: for anything truncated, damaged, too large or not taken; with the reason.
        InputError: if a package is missing.
    """
    if data.startswith(NPY_MAGIC):
        return open_npy(data, max_pixels)
    if data.startswith(PNG_MAGIC):
        return open_png(data, max_pixels) if is_deep(data) else None
    if is_tiff(data):
        return open_tiff(data, max_pixels, every_band=every_band)
    if data.startswith(NPZ_MAGIC):
        return open_npz(data, max_pixels)
    if is_dicom(data):
        return open_dicom(data, max_pixels)
    return None


def open_bands(data: bytes, bands: Bands, *, max_pixels: int | None = None) -> Raster:
    """Decodes an image of the bands that a data set has.

    What `prepare` wrote is NPY; shards of others, prepared in place, may hold any format.

    Raises:
        DecodeError: for anything damaged, too large, or of other bands.
    """
    raster = open_raster(data, max_pixels=max_pixels)
    count = len(bands.names)
    if raster is None or (len(raster.pixels) != count and raster.extension == "tiff"):
        # Prepared in place with options of bands, which take bands of transparency too.
        raster = open_raster(data, max_pixels=max_pixels, every_band=True)
    if raster is None:
        raise DecodeError(f"no image of {count} bands of {bands.dtype}")
    check_kind(raster.pixels, bands)
    return raster


def check_kind(pixels: np.ndarray, bands: Bands) -> None:
    """Checks that an image (C, H, W) has the bands that a data set has.

    Raises:
        DecodeError: naming both kinds.
    """
    count, dtype = len(pixels), pixels.dtype.name
    if (count, dtype) != (len(bands.names), bands.dtype):
        raise DecodeError(f"{count}x{dtype}, where all images are {len(bands.names)}x{bands.dtype}")
