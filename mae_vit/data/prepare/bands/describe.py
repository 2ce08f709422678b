"""Builds the section "bands" of `dataset.json` from statistics, and warnings about them."""

from __future__ import annotations

from typing import cast

import numpy as np

from mae_vit.core.bands import Dtype
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.data.prepare.bands.options import NONE, PERCENTILES, BandLayout
from mae_vit.data.prepare.bands.statistics import LONE, BandStatistics, BandSummary
from mae_vit.data.prepare.bands.statistics import PERCENTILES as SHARES
from mae_vit.data.shards.dataset_json import BandTable, Scale

_LOW, _HIGH = 1, 99
_SMALL_SHARE = 0.25
# From this share on, zeros may be missing pixels.
_MANY_ZEROS = 0.001
_DIGITS = 6


def describe_bands(
    layout: BandLayout, statistics: BandStatistics, scale: str | tuple[float, float] | None
) -> tuple[BandTable, list[float], list[float]]:
    """Returns the section "bands", and mean and std of each band in unit scale.

    Raises:
        InputError: if a band has no value in any image.
    """
    bands = statistics.summary()
    for name, band in zip(layout.names, bands, strict=True):
        if not band.pixels:
            raise InputError(
                f'band "{name}" has no value in any image: leave it out by --bands, or mend --nodata'
            )
    limits = _limits(layout.dtype, bands, scale)
    table = BandTable(
        names=list(layout.names),
        dtype=cast(Dtype, layout.dtype),
        scale=limits,
        nodata=layout.nodata,
        nodata_share=[round(band.missing / (band.missing + band.pixels), _DIGITS) for band in bands],
        min=[band.low for band in bands],
        max=[band.high for band in bands],
        percentiles={
            str(share): [band.percentiles[index] for band in bands] for index, share in enumerate(SHARES)
        },
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
        ends = band.percentiles[SHARES.index(_LOW)], band.percentiles[SHARES.index(_HIGH)]
        if ends[0] >= ends[1]:
            # Nearly all pixels have one value: the scale shows the others.
            ends = band.low, band.high
        low.append(ends[0])
        high.append(ends[1] if ends[1] > ends[0] else ends[0] + 1)
    return Scale(low=low, high=high, by=f"{PERCENTILES} {_LOW}, {_HIGH}")


def band_notes(table: BandTable, statistics: BandStatistics) -> list[str]:
    """Returns notes and warnings about the values, as lines of text."""
    scaled = {"given": "the given range", NONE: "their type's range"}.get(table.scale.by, table.scale.by)
    exact = "" if table.exact else f", of a sample of {statistics.sampled:,} pixels of each band"
    notes = [f"{count_of(len(table.names), 'band')} of {table.dtype}, scaled by {scaled}{exact}"]
    if constant := [
        name for name, low, high in zip(table.names, table.min, table.max, strict=True) if low == high
    ]:
        notes.append(f"warning: constant in all images: {', '.join(constant)} (leave it out by --bands)")
    used = (max(table.max) - min(table.min) + 1) / (1 << 16)
    if table.dtype in ("uint16", "int16") and table.scale.by == NONE and used < _SMALL_SHARE:
        notes.append(
            f"warning: values use {used:.2%} of the range of {table.dtype}: --scale percentiles uses all"
        )
    if statistics.lone_zeros >= _MANY_ZEROS:
        notes.append(
            f"warning: {statistics.lone_zeros:.2%} of each band's pixels or more are 0, and none are 1 to {LONE - 1}: "
            "if 0 means no data, give --nodata 0"
        )
    if any(table.nodata_share):
        value, low, high = table.nodata, min(table.nodata_share), max(table.nodata_share)
        notes.append(
            f"no-data ({'NaN' if value is None else f'{value:g}'}): {low:.2%} to {high:.2%} of the pixels"
        )
    return notes
