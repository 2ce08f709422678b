"""Reads pretrained weights: our runs and encoders, timm models, repositories on the Hub, third-party files.

No file can execute code (`mae_vit.weights.containers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer

from mae_vit.config.encoders import ENCODERS, family_of, section_class
from mae_vit.core.bands import Bands
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.hub import check_reachable, download, is_hub_name, parse_hub_name
from mae_vit.core.messages import error_reason, nearest
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.models.encoder_file import read_metadata
from mae_vit.models.geometry import Geometry, geometry_from, timm_geometry
from mae_vit.models.sizes import TIMM_PREFIX, Pool
from mae_vit.training.checkpoints.checkpoint import (
    LABELS_SEEN,
    STATE,
    BrokenCheckpoint,
    as_broken,
    list_checkpoints,
    read_description,
    read_newest,
    read_part,
    step_of,
)
from mae_vit.weights.containers import check_whole, file_in, read_content, weights_below
from mae_vit.weights.facts_beside import CONFIGS, check_function, facts_beside
from mae_vit.weights.foreign import nearest_timm
from mae_vit.weights.names import FOREIGN_ORIGIN, is_frozen
from mae_vit.weights.seen_labels import SeenLabels
from mae_vit.weights.start import (
    ENCODER_PREFIX,
    MEASURED_BY,
    STARTS,
    Weights,
    as_it_is,
    check_there,
    describe_unfinished,
    split_network,
)
from mae_vit.weights.unwrap import find_network, named_tensors

# Files in a repository on the Hub, as `mae-vit export` writes them. Third-party files with timm's names work too.
_HUB_FILES = ("encoder.safetensors", "model.safetensors")
# The parts of our checkpoints that are weights, not optimizer states.
_WEIGHTS = ("parameters", "average", "best")
_TIMM_FILES = ("model.safetensors", "pytorch_model.bin")


def read_weights(start: str) -> Weights:
    """Reads pretrained weights.

    Args:
        start: a run folder, an `encoder.safetensors`, a third-party file (`mae_vit.weights.unwrap`; "FILE@NAME" takes
            one of its networks), a folder of transformers, "timm:NAME", or "hf:USER/NAME[@REVISION]".

    Raises:
        InputError: if there are no readable weights.
        FetchUnavailable: if the Hub cannot be reached.
    """
    if is_frozen(start):
        raise InputError(f"{start} is {FOREIGN_ORIGIN}, and only measured here: give it to {MEASURED_BY}")
    if start.startswith(TIMM_PREFIX):
        return _read_timm(start)
    check_there(start)
    path, network = split_network(start)
    try:
        if is_hub_name(start):
            return _read_hub(start)
        if path.is_dir():
            return _read_run(path)
        return _read_file(path, network)
    except (InputError, FetchUnavailable):
        raise
    except OSError as error:
        raise InputError(f"cannot read {error.filename or start}: {error_reason(error)}") from None
    except Exception as error:  # any malformed content of an untrusted file
        raise InputError(f"{start} holds no weights: {error_reason(error)}") from None


def _read_run(folder: Path) -> Weights:
    """Reads the newest intact checkpoint, which has the objective's parts; else the exported encoder."""
    if (folder / "model.safetensors").exists():
        # Fine-tuned: these are its best weights, which the newest checkpoint may lack.
        return _read_file(folder / "model.safetensors")
    exported = folder / "encoder.safetensors"
    instead = f"; {exported} is there as well" if exported.exists() else ""
    try:
        weights, broken = read_newest(folder / "checkpoints", _read_checkpoint)
    except BrokenCheckpoint as error:
        raise InputError(f"start {folder} cannot be used: {error}{instead}") from None
    if weights is not None:
        step = step_of(Path(weights.source))
        if step == 0:
            newer = str(broken[0]) if broken else "copy the folder again, if it was trained"
            raise InputError(f"start {folder} has a checkpoint of step 0 alone: {newer}{instead}")
        remarks = {
            "passed over": "; ".join(map(str, broken)),
            "unfinished": describe_unfinished(folder, step),
        }
        return replace(weights, remarks={title: text for title, text in remarks.items() if text})
    for name in ("encoder.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return _read_file(folder / name)
    if (file := file_in(folder)) is not None:
        return _read_file(file)
    if (run := _run_around(folder)) is not None:
        hint = f": give {run}"
    else:
        below = weights_below(folder)
        hint = f': did you mean "{below}"?' if below else ""
    raise InputError(
        f"start {folder} is no run folder, it has neither checkpoints nor an encoder.safetensors{hint}"
    )


def _run_around(path: Path) -> Path | None:
    """Returns the run folder around a part of its checkpoints; None if there is none."""
    return next((run for run in path.absolute().parents if list_checkpoints(run / "checkpoints")), None)


def _read_checkpoint(path: Path) -> Weights:
    """Reads the parameters of one of our checkpoints, and the facts about them."""
    with as_broken(path):
        described = read_description(path)
        # If a run keeps an average of its weights, that is its result.
        part = "average" if "average" in described["sha256"] else "parameters"
        tensors = read_part(path, part, described)
        if "buffers" in described["sha256"]:  # BatchNorm's statistics
            tensors = {**tensors, **read_part(path, "buffers", described)}
        identity: dict[str, Any] = described["identity"]
    mean, std = identity.get("data.mean"), identity.get("data.std")
    geometry = _run_geometry(identity, path)
    return Weights(
        source=str(path),
        tensors={
            name.removeprefix(ENCODER_PREFIX).removeprefix(geometry.holder): tensors[name] for name in tensors
        },
        objective=identity.get("objective.name"),
        num_heads=getattr(geometry, "num_heads", None),
        mean=tuple(mean) if mean else None,
        std=tuple(std) if std else None,
        geometry=geometry,
        labels=_read_labels(identity.get(LABELS_SEEN)),
        bands=Bands.of_entry({"bands": identity.get("data.bands")}),
        preprocessing=Preprocessing.of_entry({"preprocessing": identity.get("data.preprocessing")}),
        pool=identity.get("finetune.pool") or identity.get("objective.pool") or "mean",
    )


def _read_labels(values: Any) -> SeenLabels | None:
    return SeenLabels.model_validate(values) if values else None


def _run_geometry(identity: dict[str, Any], path: Path) -> Geometry:
    """Returns the encoder's geometry from the config in the checkpoint at `path`."""
    values = {
        key.removeprefix("model."): value for key, value in identity.items() if key.startswith("model.")
    }
    section = section_class(family_of(values), path)
    return section.model_validate({**values, "init": None, "patch_init": None}).geometry()


def _network_geometry(metadata: Mapping[str, Any]) -> Geometry:
    """Returns the geometry of a fine-tuned network without its head."""
    # Patch size 1: nothing masked its patches.
    facts = {"name": metadata["network"], "img_size": metadata["img_size"], "patch_size": 1}
    return ENCODERS["network"].model_validate({**facts, "in_chans": len(metadata["mean"])}).geometry()


def _read_file(path: Path, network: str | None = None) -> Weights:
    """Reads the encoder in a file, ours or third-party, in any supported container and naming."""
    if (path.parent / STATE).is_file() and path.stem not in _WEIGHTS:
        raise InputError(f"{path} is a part of a checkpoint, and holds no weights: give {_run_around(path)}")
    metadata, content = read_content(path)
    names = [*named_tensors(content)]
    if not metadata:
        check_whole(path, names)
    section_class(metadata.get("family") or "vit", path)
    geometry = _network_geometry(metadata) if "network" in metadata else geometry_from(metadata)
    is_vit = geometry is None or geometry.family == "vit"
    network_in = find_network(content, str(path), network) if is_vit else None
    if network_in is None and not metadata:
        if not names:
            raise InputError(f"{path} holds no tensors by name: give {STARTS}")
        raise InputError(
            f"{path} holds no weights of a Vision Transformer by names that are known here: it has "
            f"{', '.join(names[:3])} and others; {as_it_is(str(path))}"
        )
    # A file of ours without an encoder holds a head.
    tensors, where = network_in or (content, "")
    facts = metadata or facts_beside(path, content)
    mean, std = facts.get("mean"), facts.get("std")
    has_decoder = any(name.startswith("decoder_") for name in tensors)
    own_pool: Pool = "mean" if metadata or "fc_norm.weight" in tensors else "cls"
    return Weights(
        source=str(path) if network is None else f"{path}@{network}",
        tensors=tensors,
        objective="mae" if has_decoder and not metadata else None,
        num_heads=facts.get("num_heads"),
        mean=tuple(mean) if mean else None,
        std=tuple(std) if std else None,
        geometry=geometry,
        labels=_read_labels(metadata.get("labels")),
        downloaded=None if network is None else path,
        bands=Bands.of_entry(metadata),
        preprocessing=Preprocessing.of_entry(metadata),
        pool=facts.get("pool") or own_pool,
        remarks={"found": where} if where else {},
    )


def _read_hub(start: str) -> Weights:
    """Reads the weights of a repository at the current commit of its revision; safetensors only."""
    name = parse_hub_name(start)
    path, commit = download(name, _HUB_FILES)
    if not read_metadata(path):
        for file in CONFIGS:
            with suppress(InputError):  # the repository has no such file
                download(replace(name, revision=commit), [file])
    try:
        weights = _read_file(path)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return replace(weights, source=str(replace(name, revision=commit)), downloaded=path)


def _read_timm(start: str) -> Weights:
    name = start.removeprefix(TIMM_PREFIX)
    if not timm.is_model(name.split(".")[0]):
        raise InputError(f"timm has no model {name!r}: {nearest_timm(name)}")
    try:
        known = timm.models.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        tagged = timm.list_pretrained(name.split(".")[0])
        raise InputError(f"timm has no weights {name!r}: {nearest(name, tagged)}") from None
    try:
        if known is not None and known.hf_hub_id:
            check_reachable(parse_hub_name(known.hf_hub_id), _TIMM_FILES)
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # no network, no such weights, a broken download
        reason = error_reason(error).split(". ")[0][:160]
        if known is None or not known.has_weights:
            raise InputError(f"timm has no weights of {name!r} ({reason})") from None
        repo = known.hf_hub_id
        by_hand = (
            f"; or give DIR/model.safetensors after `hf download {repo} --local-dir DIR`" if repo else ""
        )
        raise InputError(f"cannot fetch the weights of {start}, network needed ({reason}){by_hand}") from None
    if isinstance(model, VisionTransformer):
        check_function(model, start)
    config = model.pretrained_cfg
    return Weights(
        start,
        model.state_dict(),
        num_heads=model.blocks[0].attn.num_heads if isinstance(model, VisionTransformer) else None,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        geometry=timm_geometry(model) if isinstance(model, VisionTransformer) else None,
        pool="mean" if getattr(model, "global_pool", None) == "avg" else "cls",
    )
