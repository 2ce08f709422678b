"""Loads pretrained weights into a model: loads what fits and reports the rest.

`mae_vit.weights.read` reads the weights from a file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from math import isqrt

import numpy as np
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.models.pos_embed import sincos_position_table
from mae_vit.models.sizes import PatchInit
from mae_vit.models.vit import ViTEncoder
from mae_vit.weights import other_bands
from mae_vit.weights.load_report import LoadReport, shorten
from mae_vit.weights.start import ENCODER_PREFIX, Normalized, Weights, another_kind

# A file with a smaller share of the encoder's parameters belongs to another model.
MIN_COVERAGE = 0.9
# How many missing tensors a message names.
_NAMED = 3
# Parts that only other encoders have (layer scale, registers, a norm before the blocks, rotary positions).
# Without them the remaining weights compute something else.
_OWN = re.compile(r"blocks\.\d+\.(norm1|attn\.qkv|attn\.proj|norm2|mlp\.fc1|mlp\.fc2)\.(weight|bias)")
_FOREIGN = (
    "blocks.",
    "reg_token",
    "register",
    "storage_tokens",
    "norm_pre.",
    "dist_token",
    "rope",
    "rel_pos",
    "attn_pool.",
)


def _check_finite(start: Weights) -> None:
    """Refuses weights that no training can go on from."""
    for name, tensor in start.tensors.items():
        if tensor.is_floating_point() and tensor.device.type != "meta" and not bool(tensor.isfinite().all()):
            raise InputError(
                f"{start.source}: {name} has values that are not finite; these weights are of no use"
            )


def load_weights(
    start: Weights,
    encoder: ViTEncoder,
    parts: nn.Module | None = None,
    *,
    objective: str | None = None,
    patch_init: PatchInit | None = None,
) -> LoadReport:
    """Loads an encoder, and the parts of an objective if the weights are of the same objective.

    Args:
        start: pretrained weights from `read_weights`.
        encoder: the encoder; it is changed in place.
        parts: the objective around the encoder; None to load only the encoder.
        objective: name of that objective.
        patch_init: how the patch projection is adapted to another number of channels; None is "repeat".

    Raises:
        InputError: if the geometry does not fit (names the difference), or if the weights have less
            than `MIN_COVERAGE` of the encoder's parameters.
    """
    check_kind(start)
    _check_blocks(start, encoder)
    _check_finite(start)
    coverage = LoadReport(
        passed_over=start.passed_over,
        unfinished=start.unfinished,
        found=start.found,
        assumed=start.assumes(encoder.blocks[0].attn.num_heads),
    )
    state = encoder.state_dict()
    taken: dict[str, Tensor] = {}
    for name, expected in state.items():
        loaded = start.tensors.get(name)
        if loaded is not None and name == other_bands.NAME:
            loaded = _adapt_channels(loaded, expected, patch_init, coverage, start.source)
        if name in coverage.by_design:
            continue
        if loaded is None and name == "pos_embed" and not encoder.pos_embed.requires_grad:
            coverage.kept[name] = "fixed sin-cos table, which the file lacks"
        elif loaded is None:
            coverage.random.append(name)
        elif name == "pos_embed":
            _load_positions(loaded, expected, encoder, taken, coverage, start)
        elif loaded.shape != expected.shape:
            raise InputError(f"{start.source} does not fit the model: {_difference(name, loaded, expected)}")
        else:
            taken[name] = loaded
            if name not in coverage.adapted:
                coverage.loaded.append(name)
    total = sum(value.numel() for value in state.values())
    there = sum(state[name].numel() for name in {*taken, *coverage.kept, *coverage.by_design} & set(state))
    coverage.share = there / total
    if coverage.share < MIN_COVERAGE:
        raise InputError(
            f"{start.source} covers {coverage.share:.0%} of the encoder's parameters (at least "
            f"{MIN_COVERAGE:.0%} needed): it is another model's; missing: {shorten(coverage.random)}"
        )
    encoder.load_state_dict({**state, **taken})
    used = set(state)
    if parts is not None:
        used |= _load_parts(start, parts, objective, coverage)
    coverage.skipped = sorted(name for name in start.tensors if name not in used)
    return coverage


def _adapt_channels(
    loaded: Tensor, expected: Tensor, how: PatchInit | None, coverage: LoadReport, source: str
) -> Tensor:
    """Adapts a patch projection that differs in its channels alone; the report says how.

    Raises:
        InputError: if an option changes nothing.
    """
    theirs, ours = loaded.shape, expected.shape
    if len(theirs) != 4 or theirs[1] == ours[1] or (*theirs[:1], *theirs[2:]) != (*ours[:1], *ours[2:]):
        if how is not None and theirs == ours:
            raise InputError(
                f'model.patch_init="{how}" changes nothing: {source} takes {ours[1]} channels, too'
            )
        return loaded
    if how == "fresh":
        coverage.by_design[other_bands.NAME] = f"fresh: {theirs[1]} -> {ours[1]} channels"
        return loaded
    adapted, done = other_bands.adapt_patch_projection(loaded.float(), ours[1], how or "repeat")
    coverage.adapted[other_bands.NAME] = done
    return adapted


def warn_normalization_differs(
    start: Normalized, mean: Sequence[float], std: Sequence[float], bands: Bands | None = None
) -> None:
    """Warns if the run normalizes images differently from the pretrained weights. Only an override causes it.

    With another number or type of bands it has to: the load report says so.
    """
    fitted = other_bands.fit_normalization(start, bands, len(mean))
    if fitted is not None and not np.allclose(fitted, (mean, std), rtol=1e-9, atol=0):
        theirs, ours = ([round(value, 4) for value in values] for values in (fitted[0], mean))
        print(
            f"warning: {start.source} was trained on images normalized by mean {theirs}, "
            f"this run's is {ours} (data.normalize)",
            file=sys.stderr,
        )


def check_kind(start: Weights) -> None:
    """Checks that the weights have no parts that our encoder lacks, and every block.

    Raises:
        InputError: if they have; without these parts the rest computes something else. Or if a block is missing.
    """
    own = {"reg_token"} if start.geometry and start.geometry.class_tokens > 1 else set()
    foreign = [
        name
        for name in start.tensors
        if name.startswith(_FOREIGN) and not _OWN.fullmatch(name) and name not in own
    ]
    if "dist_token" in foreign:
        raise another_kind(start.source, "it was distilled, and its blocks expect a second token")
    if foreign:
        raise another_kind(
            start.source, f"ours has no {foreign[0]} ({count_of(len(foreign), 'such tensor')})"
        )
    if "patch_embed.proj.weight" in start.tensors and "cls_token" not in start.tensors:
        raise another_kind(start.source, "it has no class token, ours has one")
    blocks = {int(name.split(".")[1]) for name in start.tensors if name.startswith("blocks.")}
    depth = start.geometry.depth if start.geometry else max(blocks, default=-1) + 1
    if blocks and (lost := sorted({*range(depth)} - blocks)):
        raise InputError(f"{start.source} is not complete: it has no block {lost[0]} of {depth}")


def check_complete(start: Weights, absent: Sequence[str]) -> None:
    """Refuses to measure features of a network of which tensors are random.

    Args:
        start: the weights.
        absent: names of the tensors that the network needs and the weights lack.

    Raises:
        InputError: if there are any; names the first ones.
    """
    if absent:
        more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        raise InputError(f"{start.source} is not complete: it has no {', '.join(absent[:_NAMED])}{more}")


def _check_blocks(start: Weights, encoder: ViTEncoder) -> None:
    """Checks the numbers of class tokens, blocks and heads, which tensor shapes do not reveal.

    Raises:
        InputError: if one differs.
    """
    stated = start.geometry.class_tokens if start.geometry else 1
    if stated != encoder.num_prefix_tokens:
        raise InputError(
            f"{start.source} does not fit the model: class_tokens is {stated} there, "
            f"model.class_tokens={encoder.num_prefix_tokens} here"
        )
    depth = len({name.split(".")[1] for name in start.tensors if name.startswith("blocks.")})
    if depth and depth != len(encoder.blocks):
        raise InputError(
            f"{start.source} does not fit the model: depth is {depth} there, "
            f"model.depth={len(encoder.blocks)} here"
        )
    own_heads = encoder.blocks[0].attn.num_heads
    if start.num_heads not in (None, own_heads):
        raise InputError(
            f"{start.source} does not fit the model: num_heads is {start.num_heads} there, "
            f"model.num_heads={own_heads} here"
        )


def _load_positions(
    loaded: Tensor,
    expected: Tensor,
    encoder: ViTEncoder,
    taken: dict[str, Tensor],
    coverage: LoadReport,
    start: Weights,
) -> None:
    """Loads learnable positions; resamples them in 2-D for another grid and keeps the rows of class tokens.

    Fixed positions are only checked: the model computes its own table.
    """
    source = start.source
    if start.geometry is None and loaded.ndim == 3 and loaded.shape[1] != expected.shape[1]:
        loaded, added = with_class_position(loaded)
        if added:
            coverage.adapted["pos_embed"] = (
                "has no row for the class token, so it is 0 there: the same function"
            )
    if loaded.ndim != 3 or loaded.shape[-1] != expected.shape[-1]:
        raise InputError(f"{source} does not fit the model: {_difference('pos_embed', loaded, expected)}")
    count = encoder.num_prefix_tokens
    num_loaded, known = loaded.shape[1] - count, start.grid_size
    if known is not None and known[0] * known[1] != num_loaded:
        raise another_kind(
            source,
            f"its pos_embed has {loaded.shape[1]} rows for {known[0]} x {known[1]} patches, ours one for each and "
            f"{count} for class tokens",
        )
    side = round(num_loaded**0.5)
    if not encoder.pos_embed.requires_grad:
        grid = known or (encoder.grid_size if num_loaded == encoder.num_patches else (side, side))
        if grid[0] * grid[1] != num_loaded or not torch.allclose(
            loaded.float(), sincos_position_table(grid, loaded.shape[-1], count), atol=1e-4
        ):
            raise InputError(
                f'{source} has learned positions, which model.pos_embed="sincos" would throw away: use "learnable"'
            )
        coverage.kept["pos_embed"] = "fixed sin-cos table, the same function"
        return
    if known == encoder.grid_size or (known is None and num_loaded == encoder.num_patches):
        taken["pos_embed"] = loaded
        coverage.loaded.append("pos_embed")
        return
    old_rows, old_columns = known or (side, side)
    if old_rows * old_columns != num_loaded:
        raise InputError(
            f"{source} does not fit the model: pos_embed of {num_loaded} patches is of no square image"
        )
    taken["pos_embed"] = resample_abs_pos_embed(
        loaded.float(), list(encoder.grid_size), [old_rows, old_columns], num_prefix_tokens=count
    )
    rows, columns = encoder.grid_size
    coverage.interpolated["pos_embed"] = f"{old_rows} x {old_columns} -> {rows} x {columns} patches"


def with_class_position(table: Tensor) -> tuple[Tensor, bool]:
    """Gives a table of positions (1, N, D) of a square image a row of zeros for the class token, if it has none.

    Returns:
        The table, and whether it had none: as many rows as a square has are one more than no other square's.
    """
    if table.ndim != 3 or isqrt(table.shape[1]) ** 2 != table.shape[1]:
        return table, False
    return torch.cat([table.new_zeros(1, 1, table.shape[2]), table], dim=1), True


def _load_parts(start: Weights, parts: nn.Module, objective: str | None, coverage: LoadReport) -> set[str]:
    """Loads the decoder or heads if the weights are of the same objective: all of them or none.

    Returns:
        The names that were loaded. Fixed tables are not among them, because the model computes its own.
    """
    state = {
        name: value
        for name, value in parts.named_parameters()
        if value.requires_grad and not name.startswith(ENCODER_PREFIX)
    }
    same = start.objective == objective and all(
        name in start.tensors and start.tensors[name].shape == value.shape for name, value in state.items()
    )
    if not same:
        coverage.random += list(state)
        return set()
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(start.tensors[name])
    coverage.loaded += list(state)
    return set(state)


def _difference(name: str, loaded: Tensor, expected: Tensor) -> str:
    """Describes a difference of shape, if possible as the config key that differs."""
    if name == "patch_embed.proj.weight" and loaded.ndim == 4:
        for axis, what in ((2, "patch_size"), (1, "in_chans"), (0, "embed_dim")):
            if loaded.shape[axis] != expected.shape[axis]:
                return f"{what} is {loaded.shape[axis]} there, model.{what}={expected.shape[axis]} here"
    if name in ("cls_token", "norm.weight") or name.endswith("norm1.weight") or name == "pos_embed":
        return f"embed_dim is {loaded.shape[-1]} there, model.embed_dim={expected.shape[-1]} here"
    return f"{name} is {list(loaded.shape)} there, {list(expected.shape)} here"
