"""Loads pretrained weights (from `mae_vit.weights.read`) into a model: loads matching tensors and reports the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.models.encoders.base import DoesNotFit, Encoder, LoadReport, shorten
from mae_vit.models.geometry import ViTGeometry
from mae_vit.weights.facts import difference_of
from mae_vit.weights.names import another_kind
from mae_vit.weights.read import ENCODER_PREFIX, Weights

# A file with a smaller fraction of the encoder's parameters belongs to another model.
MIN_COVERAGE = 0.9
# Largest number of missing tensors that a message names.
_NAMED = 3


def load_weights(
    weights: Weights, encoder: Encoder, parts: nn.Module | None = None, *, objective: str | None = None
) -> LoadReport:
    """Loads an encoder in place, and `parts`, the objective around it, if the weights come from `objective` too.

    Raises InputError if the geometry differs (names the difference), or if the weights have less than `MIN_COVERAGE` of
    the encoder's parameters.
    """
    check_kind(weights)
    if weights.geometry is not None and weights.geometry.family != encoder.family:
        ours, theirs = encoder.family, weights.network.name if weights.network else weights.geometry.family
        hint = f"; give model.name={weights.network.name}" if weights.network else ""
        raise InputError(
            f"{weights.source} does not fit the model: it is {theirs}, the model is {ours}{hint}"
        )
    tensors = {**weights.tensors}
    joined = tensors.get("cls_token")
    if joined is not None and joined.ndim == 3 and joined.shape[1] > 1:  # transformers' PixioModel
        tensors |= {"cls_token": joined[:, :1], "reg_token": joined[:, 1:]}
    assumed = weights.assumes(getattr(encoder, "num_heads", None))
    sizes = {"img_size": (weights.geometry or weights).img_size, "grid": weights.grid}
    report = LoadReport(remarks={**weights.remarks, **({"assumed": assumed} if assumed else {})})
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.is_meta and not tensor.isfinite().all():
            raise InputError(f"{weights.source}: {name} has values that are not finite; give other weights")
    state = encoder.weights()
    taken: dict[str, Tensor] = {}
    try:
        encoder.check(tensors, weights.geometry, weights.num_heads)
        for name in state:
            loaded = tensors.get(name)
            if loaded is None and name in encoder.fixed:
                report.kept[name] = "fixed sin-cos table, which the file lacks"
            elif loaded is None:
                report.random.append(name)
            elif (fitted := encoder.adapt(name, loaded, report, **sizes)) is not None:
                taken[name] = fitted
    except DoesNotFit as error:
        raise InputError(f"{weights.source} does not fit the model: {error}") from None
    total = sum(value.numel() for value in state.values())
    there = sum(state[name].numel() for name in {*taken, *report.kept, *report.by_design} & set(state))
    report.share = there / total
    if report.share < MIN_COVERAGE:
        raise InputError(
            f"{weights.source} fits only {report.share:.0%} of the encoder's parameters (at least "
            f"{MIN_COVERAGE:.0%} needed), so it is from another model; missing: {shorten(report.random)}"
        )
    encoder.load({**state, **taken})
    used = set(state)
    if parts is not None:
        used |= _load_parts(weights, parts, objective, report)
    report.skipped = sorted(name for name in weights.tensors if name not in used)
    return report


def fit_normalization(
    weights: Weights, bands: Bands, channels: int
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


def warn_normalization_differs(
    weights: Weights, mean: Sequence[float], std: Sequence[float], bands: Bands = RGB8
) -> None:
    """Warns if the run normalizes images differently from the pretrained weights, which only an override causes.

    With another number or type of bands it must differ: the load report says so.
    """
    fitted = fit_normalization(weights, bands, len(mean))
    if fitted is not None and not np.allclose(fitted, (mean, std), rtol=1e-9, atol=0):
        there, here = (
            [[round(value, 4) for value in values] for values in pair] for pair in (fitted, (mean, std))
        )
        print(
            f"warning: {weights.source} was trained with mean {there[0]}, this run uses {here[0]}; "
            f"data.normalize={str(there).replace(' ', '')} is theirs",
            file=sys.stderr,
        )


def check_kind(weights: Weights) -> None:
    """Raises InputError if the weights have parts that our encoder lacks, or lack a block or the class token."""
    if weights.geometry is not None and not isinstance(weights.geometry, ViTGeometry):
        return
    if difference := difference_of(weights.tensors, weights.geometry.class_tokens if weights.geometry else 1):
        raise another_kind(weights.source, difference)
    blocks = {int(name.split(".")[1]) for name in weights.tensors if name.startswith("blocks.")}
    depth = weights.geometry.depth if weights.geometry else max(blocks, default=-1) + 1
    if blocks:
        check_complete(weights, [f"block {lost} of {depth}" for lost in sorted({*range(depth)} - blocks)[:1]])


def check_complete(weights: Weights, absent: Sequence[str]) -> None:
    """Raises InputError, which names the first tensors, if any needed ones are `absent`."""
    if absent:
        more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        raise InputError(
            f"{weights.source} is not complete: it lacks {', '.join(absent[:_NAMED])}{more}; copy it again"
        )


def _load_parts(weights: Weights, parts: nn.Module, objective: str | None, report: LoadReport) -> set[str]:
    """Loads the decoder or heads, all or none, if the weights come from the same objective.

    Returns the loaded names, without fixed tables, which the model computes.
    """
    state = {
        name: value
        for name, value in parts.named_parameters()
        if value.requires_grad and not name.startswith(ENCODER_PREFIX)
    }
    same = weights.objective == objective and all(
        name in weights.tensors and weights.tensors[name].shape == value.shape
        for name, value in state.items()
    )
    if not same:
        report.random += list(state)
        return set()
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(weights.tensors[name])
    report.loaded += list(state)
    return set(state)
