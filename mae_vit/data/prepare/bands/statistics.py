"""Statistics of bands: exact histograms for types of 8 and 16 bits, moments and a sample for float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

PERCENTILES = (1, 2, 50, 98, 99)
# Zeros stand alone if no value is at least 1 and below this.
LONE = 10
# Pixels sampled for percentiles of float32: from each image and band, and at most from a band.
_SAMPLE_OF_IMAGE = 1024
_SAMPLE = 1 << 21


@dataclass(frozen=True)
class BandSummary:
    """Raw statistics of one band, without missing pixels.

    Attributes:
        pixels: number of pixels with a value.
        missing: number of pixels without.
        mean: mean of the values.
        std: standard deviation of the values.
        low: smallest value.
        high: largest value.
        percentiles: smallest values that the shares `PERCENTILES` of all values do not exceed.
    """

    pixels: int
    missing: int
    mean: float
    std: float
    low: float
    high: float
    percentiles: tuple[float, ...]


class BandStatistics:
    """Collects statistics image by image; partial statistics can be merged."""

    def __init__(self, count: int, dtype: str, nodata: float | None) -> None:
        """Starts with no image."""
        self.count, self.dtype, self.nodata = count, dtype, nodata
        self.exact = dtype != "float32"
        self._counts = _no_counts(count, dtype)
        self._moments = [_Moments() for _ in range(0 if self.exact else count)]
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
        for moments, band, mask in zip(self._moments, flat, valid, strict=True):
            moments.add(band[mask].astype(np.float64))
        pixels = _sampled_pixels(flat.shape[1])
        self._keep([np.where(valid[:, pixels], flat[:, pixels], np.nan)])

    def merge(self, other: BandStatistics) -> None:
        """Adds the statistics that another object has collected."""
        self._counts += other._counts
        self._missing += other._missing
        for mine, theirs in zip(self._moments, other._moments, strict=True):
            mine.merge(theirs.pixels, theirs.mean, theirs.squares, theirs.low, theirs.high)
        self._keep(other._samples)

    def _keep(self, samples: list[np.ndarray]) -> None:
        """Keeps the samples of every image, later of every second, fourth, ... image, to bound memory."""
        for sample in samples:
            if self._images % self._every == 0:
                self._samples.append(sample)
            self._images += 1
            if sum(part.shape[1] for part in self._samples[-1:]) * len(self._samples) > _SAMPLE:
                self._samples, self._every = self._samples[::2], self._every * 2

    def summary(self) -> list[BandSummary]:
        """Returns the statistics of each band; a band without any value has zeros."""
        return [self._summary(n) for n in range(self.count)]

    @property
    def lone_zeros(self) -> float:
        """Smallest share of zeros over the bands, if other values begin far above, as for missing pixels; else 0."""
        if self.dtype != "uint16" or self.nodata is not None or self._counts[:, 1:LONE].any():
            return 0.0
        return float((self._counts[:, 0] / np.maximum(self._counts.sum(axis=1), 1)).min())

    @property
    def sampled(self) -> int:
        """Number of sampled pixels of a band, which its percentiles come from."""
        return sum(sample.shape[1] for sample in self._samples)

    def _summary(self, number: int) -> BandSummary:
        if not self.exact:
            return self._sampled(number)
        values, order = _values(self.dtype)
        counts = self._counts[number][order]
        valid = ~np.isnan(values) if self.nodata is None else values != self.nodata
        valid &= ~np.isnan(values)
        missing = int(counts[~valid].sum())
        values, counts = values[valid & (counts > 0)], counts[valid & (counts > 0)]
        total = int(counts.sum())
        if not total:
            return BandSummary(0, missing, 0.0, 0.0, 0.0, 0.0, (0.0,) * len(PERCENTILES))
        mean = float(values @ counts / total)
        std = float(np.sqrt(np.square(values - mean) @ counts / total))
        ends = np.cumsum(counts)
        indices = [int(np.searchsorted(ends, -(-share * total // 100))) for share in PERCENTILES]
        percentiles = tuple(float(values[index]) for index in indices)
        return BandSummary(total, missing, mean, std, float(values[0]), float(values[-1]), percentiles)

    def _sampled(self, number: int) -> BandSummary:
        moments, missing = self._moments[number], int(self._missing[number])
        values = np.concatenate([sample[number] for sample in self._samples])
        values = values[~np.isnan(values)]
        if not moments.pixels:
            return BandSummary(0, missing, 0.0, 0.0, 0.0, 0.0, (0.0,) * len(PERCENTILES))
        # All pixels of the sample may be missing; the mean is then as good a value as any.
        values = values if len(values) else np.array([moments.mean])
        percentiles = np.percentile(values, PERCENTILES, method="inverted_cdf")
        std = float(np.sqrt(moments.squares / moments.pixels))
        return BandSummary(
            moments.pixels,
            missing,
            moments.mean,
            std,
            moments.low,
            moments.high,
            tuple(map(float, percentiles)),
        )

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


class _Moments:
    """Count, mean and sum of squared differences, merged by Chan, Golub, LeVeque (1979)."""

    def __init__(self) -> None:
        self.pixels, self.mean, self.squares = 0, 0.0, 0.0
        self.low, self.high = float("inf"), float("-inf")

    def add(self, values: np.ndarray) -> None:
        if len(values):
            mean = float(values.mean())
            squares = float(np.square(values - mean).sum())
            self.merge(len(values), mean, squares, float(values.min()), float(values.max()))

    def merge(self, pixels: int, mean: float, squares: float, low: float, high: float) -> None:
        if not pixels:
            return
        total, delta = self.pixels + pixels, mean - self.mean
        self.squares += squares + delta**2 * self.pixels * pixels / total
        self.mean += delta * pixels / total
        self.pixels, self.low, self.high = total, min(self.low, low), max(self.high, high)


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
