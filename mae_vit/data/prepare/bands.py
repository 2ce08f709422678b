"""Images of bands in `prepare`: the layout that all images share, and statistics of raw values.

Statistics are exact histograms for types of 8 and 16 bits, moments and a sample for float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from mae_vit.core.bands import Bands, Dtype
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.shards.dataset_json import BandTable, Scale

EIGHT_BIT = "8-bit"
PERCENTILES, NONE = "percentiles", "none"
_SHARES = (1, 2, 50, 98, 99)
# Zeros stand alone if no value is at least 1 and below this.
_LONE = 10
# From this share on, zeros may be missing pixels.
_MANY_ZEROS = 0.001
# Pixels sampled for percentiles of float32: from each image and band, and at most from a band.
_SAMPLE_OF_IMAGE = 1024
_SAMPLE = 1 << 21


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


def nodata_for(dtype: str, option: float | None, stated: float | None) -> float | None:
    """Returns the value of missing pixels for images of a type; None for NaN, which always marks them in floats.

    Raises:
        DecodeError: if the type cannot hold the option's value.
    """
    value = stated if option is None else option
    if value is None or math.isnan(value):
        return None
    if dtype.startswith("float"):
        held = float(np.dtype(dtype).type(value))
        return held if math.isfinite(held) else None
    limits = np.iinfo(dtype)
    if not value.is_integer() or not limits.min <= value <= limits.max:
        if option is None:
            return None  # GDAL's files often state a value that their type cannot hold
        raise DecodeError(f"--nodata {value:g} is not a value of {dtype}")
    return value


class BandSummary(NamedTuple):
    """Raw statistics of one band: pixels with a value and without, and of the values alone all others.

    `percentiles` are the smallest values that the shares 1, 2, 50, 98 and 99 % of all values do not exceed.
    """

    pixels: int
    missing: int
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    percentiles: tuple[float, ...] = (0.0,) * len(_SHARES)


class _Moments(NamedTuple):
    """Count, mean, sum of squared differences, and range of values."""

    pixels: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def merged(self, other: _Moments) -> _Moments:
        """Merges by Chan, Golub, LeVeque (1979)."""
        if not other.pixels:
            return self
        total, delta = self.pixels + other.pixels, other.mean - self.mean
        squares = self.squares + (other.squares + delta**2 * self.pixels * other.pixels / total)
        mean = self.mean + delta * other.pixels / total
        return _Moments(total, mean, squares, min(self.low, other.low), max(self.high, other.high))


class BandStatistics:
    """Collects statistics image by image; partial statistics can be merged."""

    def __init__(self, count: int, dtype: str, nodata: float | None) -> None:
        """Starts with no image."""
        self.count, self.dtype, self.nodata = count, dtype, nodata
        self.exact = dtype != "float32"
        self._counts = _no_counts(count, dtype)
        self._moments = [_Moments()] * (0 if self.exact else count)
        self._missing = np.zeros(count, np.int64)
        self._samples: list[np.ndarray] = []
        self._every, self._images = 1, 0

    def add(self, image: np.ndarray) -> None:
        """Adds raw values (C, H, W)."""
        flat = np.ascontiguousarray(image).reshape(self.count, -1)
        if self.exact:
            for counts, band in zip(self._counts, flat, strict=True):
                new = np.bincount(band.view(np.uint8 if self.dtype == "uint8" else np.uint16))
                counts[: len(new)] += new
            return
        valid = ~np.isnan(flat)
        if self.nodata is not None:
            valid &= flat != self.nodata
        self._missing += flat.shape[1] - valid.sum(axis=1)
        for number, (band, mask) in enumerate(zip(flat, valid, strict=True)):
            if len(values := band[mask].astype(np.float64)):
                mean, low, high = float(values.mean()), float(values.min()), float(values.max())
                own = _Moments(len(values), mean, float(np.square(values - mean).sum()), low, high)
                self._moments[number] = self._moments[number].merged(own)
        pixels = _sampled_pixels(flat.shape[1])
        self._keep([np.where(valid[:, pixels], flat[:, pixels], np.nan)])

    def merge(self, other: BandStatistics) -> None:
        """Adds the statistics that another object has collected."""
        self._counts += other._counts
        self._missing += other._missing
        self._moments = [
            mine.merged(theirs) for mine, theirs in zip(self._moments, other._moments, strict=True)
        ]
        self._keep(other._samples)

    def _keep(self, samples: list[np.ndarray]) -> None:
        """Keeps the samples of every image, later of every second, fourth, ... image, to bound memory."""
        for sample in samples:
            if self._images % self._every == 0:
                self._samples.append(sample)
            self._images += 1
            if self._samples[-1].shape[1] * len(self._samples) > _SAMPLE:
                self._samples, self._every = self._samples[::2], self._every * 2

    def summary(self) -> list[BandSummary]:
        """Returns the statistics of each band; a band without any value has zeros."""
        return [(self._counted if self.exact else self._sampled)(n) for n in range(self.count)]

    @property
    def lone_zeros(self) -> float:
        """Smallest share of zeros over the bands, if other values begin far above, as for missing pixels; else 0."""
        if self.dtype != "uint16" or self.nodata is not None or self._counts[:, 1:_LONE].any():
            return 0.0
        return float((self._counts[:, 0] / np.maximum(self._counts.sum(axis=1), 1)).min())

    @property
    def sampled(self) -> int:
        """Number of sampled pixels of a band, which its percentiles come from."""
        return sum(sample.shape[1] for sample in self._samples)

    def _counted(self, number: int) -> BandSummary:
        values, order = _values(self.dtype)
        counts = self._counts[number][order]
        valid = ~np.isnan(values) if self.nodata is None else values != self.nodata
        valid &= ~np.isnan(values)
        missing = int(counts[~valid].sum())
        values, counts = values[valid & (counts > 0)], counts[valid & (counts > 0)]
        total = int(counts.sum())
        if not total:
            return BandSummary(0, missing)
        mean = float(values @ counts / total)
        std = float(np.sqrt(np.square(values - mean) @ counts / total))
        ends = np.cumsum(counts)
        indices = [int(np.searchsorted(ends, -(-share * total // 100))) for share in _SHARES]
        percentiles = tuple(float(values[index]) for index in indices)
        return BandSummary(total, missing, mean, std, float(values[0]), float(values[-1]), percentiles)

    def _sampled(self, number: int) -> BandSummary:
        moments, missing = self._moments[number], int(self._missing[number])
        if not moments.pixels:
            return BandSummary(0, missing)
        values = np.concatenate([sample[number] for sample in self._samples])
        values = values[~np.isnan(values)]
        # All pixels of the sample may be missing; the mean is then as good a value as any.
        values = values if len(values) else np.array([moments.mean])
        percentiles = tuple(map(float, np.percentile(values, _SHARES, method="inverted_cdf")))
        std = float(np.sqrt(moments.squares / moments.pixels))
        return BandSummary(moments.pixels, missing, moments.mean, std, moments.low, moments.high, percentiles)

    def __getstate__(self) -> dict[str, object]:
        # Between processes, only used values are sent: most images use few of all values.
        used = np.flatnonzero(self._counts.any(axis=0))
        return {**self.__dict__, "_counts": (used, self._counts[:, used])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        used, counts = state.pop("_counts")
        self.__dict__.update(state)
        self._counts = _no_counts(self.count, self.dtype)
        self._counts[:, used] = counts


def _no_counts(count: int, dtype: str) -> np.ndarray:
    """Returns zero counts (bands, bit patterns): 256 patterns for 8 bits, 65,536 for 16, none for float32."""
    return np.zeros((count, 0 if dtype == "float32" else 1 << 8 * np.dtype(dtype).itemsize), np.int64)


@lru_cache
def _values(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns all values of a type in ascending order, float64, and the bit pattern of each."""
    kind = np.dtype(dtype)
    patterns = np.arange(1 << 8 * kind.itemsize, dtype=np.uint8 if kind.itemsize == 1 else np.uint16)
    values = patterns.view(kind).astype(np.float64)
    order = np.argsort(values, kind="stable")
    return values[order], order


@lru_cache(maxsize=16)
def _sampled_pixels(pixels: int) -> np.ndarray:
    """Returns the indices of the pixels to sample: random, and equal for images of equal size."""
    if pixels <= _SAMPLE_OF_IMAGE:
        return np.arange(pixels)
    return np.sort(np.random.default_rng(0).choice(pixels, _SAMPLE_OF_IMAGE, replace=False))


def describe_bands(
    layout: BandLayout, statistics: BandStatistics, scale: str | tuple[float, float] | None
) -> tuple[BandTable, list[float], list[float]]:
    """Returns the section "bands" of `dataset.json`, and mean and std of each band in unit scale.

    Raises:
        InputError: if a band has no value in any image.
    """
    bands = statistics.summary()
    for name, band in zip(layout.names, bands, strict=True):
        if not band.pixels:
            raise InputError(
                f'band "{name}" has no value in any image; leave it out with --bands, or correct --nodata'
            )
    limits = _limits(layout.dtype, bands, scale)
    table = BandTable(
        names=list(layout.names),
        dtype=cast(Dtype, layout.dtype),
        scale=limits,
        nodata=layout.nodata,
        nodata_share=[round(band.missing / (band.missing + band.pixels), 6) for band in bands],
        min=[band.low for band in bands],
        max=[band.high for band in bands],
        percentiles={str(share): [b.percentiles[n] for b in bands] for n, share in enumerate(_SHARES)},
        exact=statistics.exact,
    )
    low, high = np.array(limits.low), np.array(limits.high)
    mean = (np.array([band.mean for band in bands]) - low) / (high - low)
    std = np.array([band.std for band in bands]) / (high - low)
    return table, [float(f"{v:.9g}") for v in mean], [float(f"{v:.9g}") for v in std]


def _limits(dtype: str, bands: list[BandSummary], scale: str | tuple[float, float] | None) -> Scale:
    if isinstance(scale, tuple):
        return Scale(low=[scale[0]] * len(bands), high=[scale[1]] * len(bands), by="given")
    if scale == NONE or (scale is None and dtype == "uint8"):
        whole = (0.0, 1.0) if dtype.startswith("float") else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return Scale(low=[whole[0]] * len(bands), high=[whole[1]] * len(bands), by=NONE)
    low, high = [], []
    for band in bands:
        ends = band.percentiles[0], band.percentiles[-1]
        if ends[0] >= ends[1]:
            # Nearly all pixels have one value: the scale shows the others.
            ends = band.low, band.high
        low.append(ends[0])
        high.append(ends[1] if ends[1] > ends[0] else ends[0] + 1)
    return Scale(low=low, high=high, by=f"{PERCENTILES} {_SHARES[0]}, {_SHARES[-1]}")


def band_notes(table: BandTable, statistics: BandStatistics) -> list[str]:
    """Returns notes and warnings about the values, as lines of text."""
    scaled = {"given": "the given range", NONE: "their type's range"}.get(table.scale.by, table.scale.by)
    exact = "" if table.exact else f", of a sample of {statistics.sampled:,} pixels of each band"
    notes = [f"{count_of(len(table.names), 'band')} of {table.dtype}, scaled by {scaled}{exact}"]
    ranges = zip(table.names, table.min, table.max, strict=True)
    if constant := [name for name, low, high in ranges if low == high]:
        notes.append(f"warning: constant in all images: {', '.join(constant)} (leave it out with --bands)")
    if statistics.lone_zeros >= _MANY_ZEROS:
        notes.append(
            f"warning: {statistics.lone_zeros:.2%} of each band's pixels or more are 0, and none are 1 to {_LONE - 1}: "
            "if 0 means no data, give --nodata 0"
        )
    if any(table.nodata_share):
        value, low, high = table.nodata, min(table.nodata_share), max(table.nodata_share)
        notes.append(
            f"no-data ({'NaN' if value is None else f'{value:g}'}): {low:.2%} to {high:.2%} of the pixels"
        )
    return notes
