"""The options of `prepare` for images of bands, and the layout that all images of a data set share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mae_vit.core.bands import Bands
from mae_vit.data.images.bounds import DecodeError

EIGHT_BIT = "8-bit"
PERCENTILES, NONE = "percentiles", "none"


@dataclass(frozen=True)
class BandLayout:
    """The bands, type and no-data value that all images of a data set share.

    Attributes:
        names: name of each band.
        dtype: type of raw values.
        nodata: raw value of missing pixels; None if there is none.
        named: whether the files name their bands; otherwise the names are numbers.
    """

    names: tuple[str, ...]
    dtype: str
    nodata: float | None = None
    named: bool = True

    @property
    def kind(self) -> str:
        """Bands and type: "13xuint16"."""
        return f"{len(self.names)}x{self.dtype}"

    def fits(self, other: BandLayout) -> bool:
        """Whether images of both layouts fit into one data set."""
        if (self.kind, self.nodata) != (other.kind, other.nodata):
            return False
        return self.names == other.names or not (self.named and other.named)


def shared_layout(bands: Bands) -> BandLayout:
    """Returns the layout of the images of a prepared data set."""
    named = not all(name.startswith("band ") for name in bands.names)
    return BandLayout(bands.names, bands.dtype, bands.nodata, named)


@dataclass(frozen=True)
class BandOptions:
    """Which bands are stored, and what their values mean.

    Attributes:
        select: bands in the order to store, as numbers from 1, ranges or names; empty for all.
        scale: "percentiles", "none", or the raw values that become 0 and 1; None chooses.
        nodata: raw value of missing pixels; None for the value in the files.
        window: lowest and highest value, to which raw values are clipped.
        take: the kind of images to take if files differ, such as "13xuint16" or "8-bit".
    """

    select: tuple[str, ...] = ()
    scale: str | tuple[float, float] | None = None
    nodata: float | None = None
    window: tuple[float, float] | None = None
    take: str | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The options that are set, by their names on the command line."""
        return tuple(
            f"--{'bands' if name == 'select' else name}"
            for name in ("select", "scale", "nodata", "window", "take")
            if getattr(self, name) not in (None, ())
        )

    @property
    def every_band(self) -> bool:
        """Whether 8-bit TIFF files are read as bands, too: if an option concerns their bands or values."""
        return bool(self.select) or (self.scale, self.nodata, self.window) != (None, None, None)


NO_OPTIONS = BandOptions()


def nodata_for(dtype: str, option: float | None, stated: float | None) -> float | None:
    """Returns the value of missing pixels for images of a type; None for NaN, which always marks them in floats.

    Raises:
        DecodeError: if the type cannot hold the option's value.
    """
    value = stated if option is None else option
    if value is None or math.isnan(value):
        return None
    if dtype.startswith("float"):
        return float(np.dtype(dtype).type(value)) if np.isfinite(np.dtype(dtype).type(value)) else None
    limits = np.iinfo(dtype)
    if not value.is_integer() or not limits.min <= value <= limits.max:
        if option is None:
            return None  # GDAL's files often state a value that their type cannot hold
        raise DecodeError(f"--nodata {value:g} is no value of {dtype}")
    return value
