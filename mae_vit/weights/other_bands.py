"""Adapts the normalization of pretrained weights to images of other bands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError

if TYPE_CHECKING:
    from mae_vit.weights.foreign import ForeignWeights
    from mae_vit.weights.start import Weights


def fit_normalization(
    weights: Weights | ForeignWeights, bands: Bands, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Converts mean and std of pretrained weights to the 0..1 scale of other data.

    Raw values are then normalized as in pretraining, even if 0..1 means other raw values. None if raw values are not
    comparable: another number or type of bands, or an unknown normalization.
    """
    mean, std, theirs = weights.mean, weights.std, weights.bands
    if mean is None or std is None or len(mean) != channels:
        return None
    if theirs.photographs != bands.photographs or theirs.dtype != bands.dtype:
        return None
    if (theirs.low, theirs.high) == (bands.low, bands.high):
        return mean, std
    # Raw values are linear in both scales: theirs = factor * ours + shift, in each band.
    fitted_mean, fitted_std = [], []
    ends = zip(theirs.low, theirs.high, bands.low, bands.high, strict=True)
    for place, (their_low, their_high, low, high) in enumerate(ends):
        factor, shift = (high - low) / (their_high - their_low), (low - their_low) / (their_high - their_low)
        fitted_mean.append((mean[place] - shift) / factor)
        fitted_std.append(std[place] / factor)
    return tuple(fitted_mean), tuple(fitted_std)


def fit_bands(theirs: Bands, bands: Bands, where: str) -> Bands:
    """Returns the bands with which an encoder of bands `theirs` reads data: its own scale, and the data's `nodata`.

    If the data have no `nodata`, the encoder's own remains.

    Raises:
        InputError: if the data have another number or type of bands than the encoder.
    """
    if (len(theirs.names), theirs.dtype) != (len(bands.names), bands.dtype):
        raise InputError(
            f"{where} holds images of {_kind(bands)}, the encoder takes {_kind(theirs)}: "
            "fine-tune it, which adapts its patch projection"
        )
    return replace(theirs, nodata=theirs.nodata if bands.nodata is None else bands.nodata)


def _kind(bands: Bands) -> str:
    return "8-bit gray or RGB" if bands.photographs else f"{len(bands.names)} bands of {bands.dtype}"
