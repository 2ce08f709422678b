"""From an image of bands to a member of a shard: bands chosen, window applied, statistics collected."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np

from mae_vit.core.preprocessing import Preprocessing
from mae_vit.data.images.bands.raster import Raster
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.images.preprocess import take_bands
from mae_vit.data.prepare.bands.options import BandLayout, BandOptions, nodata_for
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
    raster: Raster, options: BandOptions, how: Preprocessing, *, in_place: bool
) -> ConvertedBands:
    """Decodes an image of bands, and writes it anew where options or its format ask for it.

    Args:
        raster: the image.
        options: of the whole call.
        how: what is done to the images.
        in_place: the bytes stay as they are.

    Raises:
        DecodeError: if it is damaged, or lacks a band.
    """
    if options.take is not None and options.take != raster.kind and not options.select:
        raise DecodeError(f"{raster.kind}, where {options.take} is taken")
    nodata = nodata_for(raster.dtype, options.nodata, raster.nodata)
    pixels, names, changed = take_bands(raster, how, nodata)
    layout = BandLayout(names, raster.dtype, nodata, bool(raster.names))
    if options.take not in (None, layout.kind):
        raise DecodeError(f"{layout.kind}, where {options.take} is taken")
    if in_place or not (changed or raster.extension == "dcm"):
        return ConvertedBands(None, pixels, layout, raster.notes)
    return ConvertedBands(_as_npy(pixels), pixels, layout, (*raster.notes, "written as .npy"))


def collect(sums: Sums, image: ConvertedBands) -> None:
    """Adds an image to the statistics of its layout."""
    if image.layout not in sums:
        sums[image.layout] = BandStatistics(len(image.layout.names), image.layout.dtype, image.layout.nodata)
    sums[image.layout].add(image.pixels)


def _as_npy(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(pixels), allow_pickle=False)
    return stream.getvalue()
