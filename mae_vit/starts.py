"""Weights to begin from: our runs and encoders, timm models, official MAE files.

Nothing read here can execute code: safetensors hold no objects, and pickled files
go through torch's restricted reader.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_vit.encoder import SIZES, ViTEncoder, sincos_position_table
from mae_vit.errors import InputError

TIMM_PREFIX = "timm:"
# Less than this share of the encoder's parameters found in a file: it is another model's.
MIN_COVERAGE = 0.9
_ENCODER_PREFIX = "encoder."
_GEOMETRY = (
    "img_size",
    "patch_size",
    "in_chans",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "pos_embed",
)
# Parts of other encoders than ours (layer scale, registers, a norm in front): without them
# the rest computes something else.
_FOREIGN = ("blocks.", "reg_token", "norm_pre.", "dist_token")


@dataclass(frozen=True)
class Start:
    """Named weights, and where they are from.

    Attributes:
        source: what the user gave.
        tensors: encoder weights by timm's names; parts of an objective by the names that
            it gives them.
        objective: whose parts those are; None if there are none.
        mean: per-channel mean the network was trained with, None if not known.
        std: per-channel standard deviation.
        num_heads: attention heads, which no shape tells; None if not known.
        geometry: of the encoder, by the keys of a config's `model` section; None if not known.
    """

    source: str
    tensors: dict[str, Tensor]
    objective: str | None = None
    num_heads: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    geometry: dict[str, Any] | None = None

    @property
    def grid_size(self) -> tuple[int, int] | None:
        """Rows and columns of patches; None if not known."""
        if self.geometry is None:
            return None
        (height, width), patch = self.geometry["img_size"], self.geometry["patch_size"]
        return height // patch, width // patch

    @property
    def digest(self) -> str:
        """Changes when any of the weights does."""
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(self.tensors):
            found.update(name.encode())
            found.update(self.tensors[name].detach().cpu().float().contiguous().numpy().data)
        return found.hexdigest()


@dataclass
class Coverage:
    """What became of each tensor when a start was loaded.

    Attributes:
        loaded: names taken over.
        interpolated: position tables resampled to another grid, with both grids.
        kept: names left as they were on purpose, with the reason.
        skipped: names of the file that the model has no use for.
        random: names of the model that the file does not hold.
        by_design: names of either that are not to be taken over, with the reason.
        share: of the encoder's parameters that were loaded or interpolated.
    """

    loaded: list[str] = field(default_factory=list)
    interpolated: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    by_design: dict[str, str] = field(default_factory=dict)
    share: float = 0.0

    def describe(self, source: str) -> str:
        """A table for people."""
        lines = [f"start    {source}: {self.share:.1%} of the encoder's parameters"]
        lines.append(f"  loaded        {len(self.loaded)} tensors: {_shorten(self.loaded)}")
        for title, notes in (
            ("interpolated", self.interpolated),
            ("kept", self.kept),
            ("by design", self.by_design),
        ):
            lines += [f"  {title:<13} {name} ({note})" for name, note in notes.items()]
        for title, names in (("skipped", self.skipped), ("left random", self.random)):
            if names:
                lines.append(f"  {title:<13} {len(names)} tensors: {_shorten(names)}")
        return "\n".join(lines)


def read_start(start: str) -> Start:
    """Reads weights to begin from.

    Args:
        start: a run folder, an `encoder.safetensors` or other safetensors file with timm's
            names, an official MAE file (.pth), or "timm:NAME".

    Raises:
        InputError: if there is nothing readable there.
    """
    if start.startswith(TIMM_PREFIX):
        return _read_timm(start)
    path = Path(start)
    if not path.exists():
        raise InputError(
            f"start {start} does not exist: give a run folder, an encoder.safetensors, "
            f'an official MAE file (.pth) or "{TIMM_PREFIX}NAME"'
        )
    try:
        if path.is_dir():
            return _read_run(path)
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return _read_pickled(path)
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename or start}: {(error.strerror or str(error)).lower()}"
        ) from None
    except Exception as error:  # any malformed content of an untrusted file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{start} holds no weights: {reason}") from None


def _read_run(folder: Path) -> Start:
    """The newest checkpoint, which has the objective's parts; else the exported encoder."""
    if (folder / "model.safetensors").exists():
        # Fine-tuned: its best weights, which the newest checkpoint need not hold.
        return _read_safetensors(folder / "model.safetensors")
    latest = folder / "checkpoints" / "latest"
    if latest.exists():
        checkpoint = latest.parent / Path(latest.read_text().strip()).name
        identity: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())["identity"]
        mean, std = identity.get("data.mean"), identity.get("data.std")
        geometry = _geometry_of(identity, str(folder))
        return Start(
            source=str(checkpoint),
            tensors=_without_prefix(load_file(checkpoint / "parameters.safetensors")),
            objective=identity.get("objective.name"),
            num_heads=geometry["num_heads"],
            mean=tuple(mean) if mean else None,
            std=tuple(std) if std else None,
            geometry=geometry,
        )
    if (folder / "encoder.safetensors").exists():
        return _read_safetensors(folder / "encoder.safetensors")
    raise InputError(
        f"start {folder} is no run folder: it has neither checkpoints nor an encoder.safetensors"
    )


def _geometry_of(identity: dict[str, Any], source: str) -> dict[str, Any]:
    """The encoder of a run, by what its checkpoints say of its config."""
    name = identity["model.name"]
    if name not in SIZES:
        raise InputError(f"start {source} is a run of {name}: it has no Vision Transformer to begin from")
    size, img_size = SIZES[name], identity["model.img_size"]
    return {
        "name": name,
        "img_size": img_size if isinstance(img_size, list) else [img_size, img_size],
        "patch_size": identity["model.patch_size"],
        "in_chans": identity["model.in_chans"],
        "embed_dim": identity.get("model.embed_dim") or size.embed_dim,
        "depth": identity.get("model.depth") or size.depth,
        "num_heads": identity.get("model.num_heads") or size.num_heads,
        "mlp_ratio": identity["model.mlp_ratio"],
        "pos_embed": identity["model.pos_embed"],
    }


def _read_safetensors(path: Path) -> Start:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {}).get("mae_vit", "{}"))
    if metadata.get("network"):
        raise InputError(f"start {path} is {metadata['network']}: it has no Vision Transformer to begin from")
    mean, std = metadata.get("mean"), metadata.get("std")
    geometry = {"name": metadata.get("size"), **{key: metadata.get(key) for key in _GEOMETRY}}
    return Start(
        source=str(path),
        tensors=_without_prefix(load_file(path)),
        num_heads=metadata.get("num_heads"),
        mean=tuple(mean) if mean else None,
        std=tuple(std) if std else None,
        geometry=geometry if all(value is not None for value in geometry.values()) else None,
    )


def _read_pickled(path: Path) -> Start:
    """An official MAE file: `model` holds the weights, users' own files an argparse.Namespace too."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, of files that are then refused
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        for line in str(error).splitlines():
            if "Unsupported" in line or "GLOBAL" in line:
                reason = line.strip()
                break
        raise InputError(f"{path} is refused: it holds more than weights ({reason[:120]})") from None
    tensors = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise InputError(f'{path} holds no weights: expected tensors by name, or those under "model"')
    has_decoder = any(name.startswith("decoder_") for name in tensors)
    return Start(str(path), _without_prefix(tensors), objective="mae" if has_decoder else None)


def _read_timm(start: str) -> Start:
    name = start.removeprefix(TIMM_PREFIX)
    if not timm.is_model(name.split(".")[0]):
        raise InputError(f"timm has no model {name!r}: {_nearest_timm(name)}")
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # no network, no such weights, a broken download
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"cannot fetch the weights of {start} (network needed): {reason[:160]}") from None
    config = model.pretrained_cfg
    return Start(
        start,
        model.state_dict(),
        num_heads=model.blocks[0].attn.num_heads if isinstance(model, VisionTransformer) else None,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        geometry=_geometry_in(model) if isinstance(model, VisionTransformer) else None,
    )


def _geometry_in(model: VisionTransformer) -> dict[str, Any]:
    """The geometry of a timm model, under the name of the size nearest to it."""
    block, embed = model.blocks[0], model.patch_embed
    found = (model.embed_dim, len(model.blocks), block.attn.num_heads)
    names = [name for name, size in SIZES.items() if (size.embed_dim, size.depth, size.num_heads) == found]
    return {
        "name": names[0] if names else "S",
        "img_size": list(embed.img_size),
        "patch_size": embed.patch_size[0],
        "in_chans": embed.proj.in_channels,
        "embed_dim": found[0],
        "depth": found[1],
        "num_heads": found[2],
        "mlp_ratio": block.mlp.fc1.out_features / model.embed_dim,
        "pos_embed": "learnable",
    }


def _nearest_timm(name: str) -> str:
    known = timm.list_models()
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"it has {len(known)}, such as vit_base_patch16_224"


def load_start(
    start: Start, encoder: ViTEncoder, parts: nn.Module | None = None, *, objective: str | None = None
) -> Coverage:
    """Loads an encoder, and the parts of an objective where the start is of the same one.

    Args:
        start: from `read_start`.
        encoder: changed in place.
        parts: the objective around the encoder; None for the encoder alone.
        objective: its name.

    Raises:
        InputError: if the geometry does not fit, naming the difference, or if less than
            `MIN_COVERAGE` of the encoder is there.
    """
    _check_blocks(start, encoder)
    coverage = Coverage()
    state = encoder.state_dict()
    taken: dict[str, Tensor] = {}
    for name, own in state.items():
        found = start.tensors.get(name)
        if found is None:
            coverage.random.append(name)
        elif name == "pos_embed":
            _load_positions(found, own, encoder, taken, coverage, start)
        elif found.shape != own.shape:
            raise InputError(f"{start.source} does not fit the model: {_difference(name, found, own)}")
        else:
            taken[name] = found
            coverage.loaded.append(name)
    total = sum(value.numel() for value in state.values())
    there = sum(state[name].numel() for name in {*taken, *coverage.kept})
    coverage.share = there / total
    if coverage.share < MIN_COVERAGE:
        raise InputError(
            f"{start.source} covers {coverage.share:.0%} of the encoder's parameters (at least "
            f"{MIN_COVERAGE:.0%} needed): it is another model's; missing: {_shorten(coverage.random)}"
        )
    encoder.load_state_dict({**state, **taken})
    used = set(state)
    if parts is not None:
        used |= _load_parts(start, parts, objective, coverage)
    coverage.skipped = [name for name in start.tensors if name not in used]
    if foreign := [name for name in coverage.skipped if name.startswith(_FOREIGN)]:
        raise InputError(
            f"{start.source} is an encoder of another kind: ours has no {foreign[0]} ({len(foreign)} such tensors)"
        )
    return coverage


def _check_blocks(start: Start, encoder: ViTEncoder) -> None:
    """What shapes alone would let pass: another number of blocks, or of heads."""
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
    found: Tensor,
    own: Tensor,
    encoder: ViTEncoder,
    taken: dict[str, Tensor],
    coverage: Coverage,
    start: Start,
) -> None:
    """Positions of the same grid, of another one (2-D interpolation, [CLS] kept), or fixed."""
    source = start.source
    if found.ndim != 3 or found.shape[-1] != own.shape[-1]:
        raise InputError(f"{source} does not fit the model: {_difference('pos_embed', found, own)}")
    num_found = found.shape[1] - 1
    if not encoder.pos_embed.requires_grad:
        side = round(num_found**0.5)
        grid = encoder.grid_size if num_found == encoder.num_patches else (side, side)
        if grid[0] * grid[1] != num_found or not torch.allclose(
            found.float(), sincos_position_table(grid, found.shape[-1]), atol=1e-4
        ):
            raise InputError(
                f'{source} has learned positions, which model.pos_embed="sincos" would throw away: use "learnable"'
            )
        coverage.kept["pos_embed"] = "fixed sin-cos table, the same function"
        return
    known = start.grid_size
    if known == encoder.grid_size or (known is None and num_found == encoder.num_patches):
        taken["pos_embed"] = found
        coverage.loaded.append("pos_embed")
        return
    side = round(num_found**0.5)
    old_rows, old_columns = known or (side, side)
    if old_rows * old_columns != num_found:
        raise InputError(
            f"{source} does not fit the model: pos_embed of {num_found} patches is of no square image"
        )
    taken["pos_embed"] = resample_abs_pos_embed(
        found.float(), list(encoder.grid_size), [old_rows, old_columns]
    )
    rows, columns = encoder.grid_size
    coverage.interpolated["pos_embed"] = f"{old_rows} x {old_columns} -> {rows} x {columns} patches"


def _load_parts(start: Start, parts: nn.Module, objective: str | None, coverage: Coverage) -> set[str]:
    """The decoder or heads of the same objective, all of them or none; fixed tables are our own."""
    own = {
        name: value
        for name, value in parts.named_parameters()
        if value.requires_grad and not name.startswith(_ENCODER_PREFIX)
    }
    same = start.objective == objective and all(
        name in start.tensors and start.tensors[name].shape == value.shape for name, value in own.items()
    )
    if not same:
        coverage.random += list(own)
        return set()
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(start.tensors[name])
    coverage.loaded += list(own)
    return set(own)


def _difference(name: str, found: Tensor, own: Tensor) -> str:
    """Names what differs in the field's words where the shape tells it."""
    if name == "patch_embed.proj.weight" and found.ndim == 4:
        for axis, what in ((2, "patch_size"), (1, "in_chans"), (0, "embed_dim")):
            if found.shape[axis] != own.shape[axis]:
                return f"{what} is {found.shape[axis]} there, model.{what}={own.shape[axis]} here"
    if name in ("cls_token", "norm.weight") or name.endswith("norm1.weight") or name == "pos_embed":
        return f"embed_dim is {found.shape[-1]} there, model.embed_dim={own.shape[-1]} here"
    return f"{name} is {list(found.shape)} there, {list(own.shape)} here"


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_ENCODER_PREFIX): value for name, value in tensors.items()}


def _shorten(names: list[str]) -> str:
    """Lists names by their first part, counted: blocks (72), patch_embed (2)."""
    counts: dict[str, int] = {}
    for name in names:
        first = name.split(".")[0]
        counts[first] = counts.get(first, 0) + 1
    return ", ".join(first if count == 1 else f"{first} ({count})" for first, count in counts.items())
