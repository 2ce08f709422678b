"""From an image of bands to a member of a shard: bands chosen, window applied, statistics collected."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from mae_vit.data.images.bands.raster import Raster
from mae_vit.data.images.bands.resize import resize_bands
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.prepare.bands.options import BandLayout, BandOptions, band_number, nodata_for
from mae_vit.data.prepare.bands.statistics import BandStatistics

Sums = dict[BandLayout, BandStatistics]


class ConvertedBands(NamedTuple):
    """An image of bands in its stored form.

    Attributes:
        data: its bytes; None if they are those of the source.
        pixels: raw values (C, H, W).
        layout: its bands.
        notes: remarks, printed once for all equal ones.
    """

    data: bytes | None
    pixels: np.ndarray
    layout: BandLayout
    notes: tuple[str, ...]


def convert_bands(
    raster: Raster, options: BandOptions, *, resize: int | None, in_place: bool
) -> ConvertedBands:
    """Decodes an image of bands, and writes it anew where options or its format ask for it.

    Args:
        raster: the image.
        options: of the whole call.
        resize: short side of larger images; None keeps them.
        in_place: the bytes stay as they are.

    Raises:
        DecodeError: if it is damaged, or lacks a band.
    """
    if options.take is not None and options.take != raster.kind and not options.select:
        raise DecodeError(f"{raster.kind}, where {options.take} is taken")
    pixels, notes = raster.pixels(), list(raster.notes)
    names = raster.names or tuple(map(band_number, range(raster.count)))
    places = options.chosen(names, named=bool(raster.names))
    nodata = nodata_for(raster.dtype, options.nodata, raster.nodata)
    layout = BandLayout(tuple(names[n] for n in places), raster.dtype, nodata, bool(raster.names))
    if options.take not in (None, layout.kind):
        raise DecodeError(f"{layout.kind}, where {options.take} is taken")
    whole = places == list(range(raster.count))
    pixels = pixels if whole else pixels[places]
    _check_finite(pixels, layout.names)
    changed = not whole or options.window is not None
    if options.window is not None:
        pixels = _clipped(pixels, options.window, nodata)
    if resize is not None and min(pixels.shape[1:]) > resize:
        pixels, changed = resize_bands(pixels, _smaller(pixels.shape[1:], resize), nodata), True
    if in_place or not (changed or raster.extension == "dcm"):
        return ConvertedBands(None, pixels, layout, tuple(notes))
    return ConvertedBands(_as_npy(pixels), pixels, layout, (*notes, "written as .npy"))


def photograph_of(raster: Raster, options: BandOptions) -> bytes | None:
    """Returns a DICOM image of 8-bit gray or RGB as PNG, which is treated like other photographs; else None."""
    plain = raster.extension == "dcm" and raster.dtype == "uint8" and raster.count in (1, 3)
    if not plain or options.given:
        return None
    pixels = raster.pixels()
    image = Image.fromarray(
        np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    )
    stream = io.BytesIO()
    image.save(stream, "png")
    return stream.getvalue()


def collect(sums: Sums, image: ConvertedBands) -> None:
    """Adds an image to the statistics of its layout."""
    if image.layout not in sums:
        sums[image.layout] = BandStatistics(len(image.layout.names), image.layout.dtype, image.layout.nodata)
    sums[image.layout].add(image.pixels)


def _check_finite(pixels: np.ndarray, names: Sequence[str]) -> None:
    if pixels.dtype.kind != "f":
        return
    for name, band in zip(names, pixels, strict=True):
        if np.isinf(band).any():
            raise DecodeError(f'infinite values in band "{name}": write NaN where a value is missing')


def _clipped(pixels: np.ndarray, window: tuple[float, float], nodata: float | None) -> np.ndarray:
    low, high = window
    if pixels.dtype.kind != "f":
        limits = np.iinfo(pixels.dtype)
        low, high = max(np.ceil(low), limits.min), min(np.floor(high), limits.max)
        if low >= high:
            raise DecodeError(f"--window holds no values of {pixels.dtype.name}")
    clipped = np.clip(pixels, pixels.dtype.type(low), pixels.dtype.type(high))
    return clipped if nodata is None else np.where(pixels == pixels.dtype.type(nodata), pixels, clipped)


def _smaller(size: Sequence[int], resize: int) -> tuple[int, int]:
    scale = resize / min(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _as_npy(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(pixels), allow_pickle=False)
    return stream.getvalue()
