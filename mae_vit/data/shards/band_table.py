"""The section "bands" of `dataset.json`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# `mae_vit.core.bands.DTYPES`, as a type.
Dtype = Literal["uint8", "uint16", "int16", "float16", "float32"]


class StrictModel(BaseModel):
    """A part of `dataset.json`: unchangeable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Scale(StrictModel):
    """Raw values of each band that are 0 and 1 in unit scale.

    Attributes:
        low: is 0.
        high: is 1.
        by: "percentiles 1, 99" of the band, "given" by the user, or "none": the type's own range (0..1 of floats).
    """

    low: list[float]
    high: list[float]
    by: str


class BandTable(StrictModel):
    """The section "bands" of images other than 8-bit gray or RGB: what their values mean, and raw statistics of train.

    Attributes:
        names: one a band.
        dtype: of raw values.
        scale: raw values to unit scale, in which the mean and std of the data set are.
        nodata: raw value of missing pixels; None if there is none (NaN in floating-point images).
        nodata_share: share of each band's pixels without a value, 0 to 1.
        min: smallest raw value of each band.
        max: largest.
        percentiles: raw values by percentile ("1", "2", "50", "98", "99"), one a band.
        exact: whether the percentiles are of all pixels; else of a sample of them.
    """

    names: list[str] = Field(min_length=1)
    dtype: Dtype
    scale: Scale
    nodata: float | None = None
    nodata_share: list[float]
    min: list[float]
    max: list[float]
    percentiles: dict[str, list[float]]
    exact: bool

    @model_validator(mode="after")
    def _check(self) -> BandTable:
        count = len(self.names)
        if len(set(self.names)) < count:
            raise ValueError("two bands have one name")
        for name, values in {
            "scale.low": self.scale.low,
            "scale.high": self.scale.high,
            "nodata_share": self.nodata_share,
            "min": self.min,
            "max": self.max,
            **{f"percentiles.{key}": values for key, values in self.percentiles.items()},
        }.items():
            if len(values) != count or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} needs {count} finite numbers, one for each name")
        if any(high <= low for low, high in zip(self.scale.low, self.scale.high, strict=True)):
            raise ValueError("scale.high must be above scale.low in each band")
        return self
