"""The section "bands" of `dataset.json` from statistics, and what is worth a warning in them."""

from __future__ import annotations

from typing import cast

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.bands.options import NONE, PERCENTILES, BandLayout
from mae_vit.data.prepare.bands.statistics import LONE, BandStatistics, BandSummary
from mae_vit.data.prepare.bands.statistics import PERCENTILES as SHARES
from mae_vit.data.shards.dataset_json import BandTable, Dtype, Scale

_LOW, _HIGH = 1, 99
_SMALL_SHARE = 0.25
# Fewer zeros than this share are no reason to ask whether they are missing pixels.
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
    empty = [name for name, band in zip(layout.names, bands, strict=True) if not band.pixels]
    if empty:
        raise InputError(
            f'band "{empty[0]}" has no value in any image (no-data: {_nodata(layout)}): leave it out by --bands'
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
            str(share): [band.percentiles[place] for band in bands] for place, share in enumerate(SHARES)
        },
        exact=statistics.exact,
    )
    low, high = np.array(limits.low), np.array(limits.high)
    mean = (np.array([band.mean for band in bands]) - low) / (high - low)
    std = np.array([band.std for band in bands]) / (high - low)
    return table, [float(f"{v:.9g}") for v in mean], [float(f"{v:.9g}") for v in std]


def _nodata(layout: BandLayout) -> str:
    return "NaN" if layout.nodata is None else f"{layout.nodata:g}"


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
            # Nearly all pixels have one value: the others are what there is to see.
            ends = band.low, band.high
        low.append(ends[0])
        high.append(ends[1] if ends[1] > ends[0] else ends[0] + 1)
    return Scale(low=low, high=high, by=f"{PERCENTILES} {_LOW}, {_HIGH}")


def band_notes(table: BandTable, statistics: BandStatistics) -> list[str]:
    """Returns what a user should know of the values: lines of text."""
    notes = []
    scaled = table.scale.by if table.scale.by != "given" else "the given range"
    scaled = "their type's range" if scaled == NONE else scaled
    notes.append(f"{len(table.names)} bands of {table.dtype}, scaled by {scaled}")
    if constant := [
        name for name, low, high in zip(table.names, table.min, table.max, strict=True) if low == high
    ]:
        notes.append(f"warning: constant in all images: {_listed(constant)} (leave it out by --bands)")
    if "16" in table.dtype and "int" in table.dtype:
        whole, low, high = 1 << 16, min(table.min), max(table.max)
        share = (high - low + 1) / whole
        if share < _SMALL_SHARE:
            advice = " --scale percentiles would use all of it" if table.scale.by == NONE else ""
            notes.append(
                f"warning: values from {low:.0f} to {high:.0f} are {100 * share:.2g} % of the range of {table.dtype};"
                f"{advice or f' unit scale is by {scaled}'}"
            )
    if statistics.lone_zeros >= _MANY_ZEROS:
        notes.append(
            f"warning: {100 * statistics.lone_zeros:.2g} % of each band's pixels or more are 0, and none are 1 to "
            f"{LONE - 1}: if 0 means no data, give --nodata 0"
        )
    if any(table.nodata_share):
        shares = [f"{100 * share:.2g}" for share in table.nodata_share]
        what = "NaN" if table.nodata is None else f"{table.nodata:g}"
        text = shares[0] if len(set(shares)) == 1 else f"{min(shares, key=float)} to {max(shares, key=float)}"
        notes.append(f"no-data ({what}): {text} % of the pixels, left out of the statistics")
    if not table.exact:
        notes.append(f"percentiles are from a sample of {statistics.sampled:,} pixels of each band")
    return notes


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
