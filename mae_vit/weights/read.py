"""Reads pretrained weights: our runs and encoders, timm models, repositories on the Hub, third-party files.

No file can execute code (`mae_vit.weights.containers`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import timm
from pydantic import ValidationError
from torch import Tensor

from mae_vit.config.encoders import ENCODERS, family_of, section_class
from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.hub import check_reachable, download, is_hub_name, parse_hub_name
from mae_vit.core.messages import error_reason
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.models.encoder_file import read_metadata
from mae_vit.models.geometry import Geometry, NetworkGeometry, geometry_from, timm_geometry
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
from mae_vit.weights.containers import check_whole, file_in, read_content
from mae_vit.weights.facts import (
    CONFIGS,
    checked_geometry,
    config_beside,
    facts_beside,
    facts_of_timm,
    is_ours,
    options_in,
    plain_reason,
)
from mae_vit.weights.names import (
    FOREIGN_ORIGIN,
    FORMS,
    HEADS_BESIDE,
    SIZE_BESIDE,
    check_exists,
    origin_of,
    split_network,
    split_timm,
    with_timms_name,
)
from mae_vit.weights.seen_labels import SeenLabels
from mae_vit.weights.timm_network import TimmNetwork, find_beside, find_timm, nearest_timm, unwrapped
from mae_vit.weights.unwrap import check_values, find_network, named_tensors, with_whole_qkv

ENCODER_PREFIX = "encoder."
# Files in a repository on the Hub, as `mae-vit export` writes them. Third-party files with timm's names work too.
_HUB_FILES = ("encoder.safetensors", "model.safetensors")
_TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
# The parts of our checkpoints that are weights, not optimizer states.
_WEIGHTS = ("parameters", "average", "best")


@dataclass(frozen=True)
class Weights:
    """Named weights, and the facts about them; each fact is None if it is unknown.

    Attributes:
        source: the checkpoint or file that was read, "timm:NAME", or "hf:USER/NAME@COMMIT".
        tensors: encoder weights by timm's names; parts of an objective by its own names.
        objective: name of the objective whose parts are included.
        num_heads: number of attention heads, which no shape shows.
        mean: mean of each channel in training; `std` is its standard deviation.
        img_size: (H, W) in pixels of the images in training.
        labels: labels of the training.
        classes: names of the classes of images or pixels that it predicts; empty if unknown.
        downloaded: path of the file if `source` is not a path.
        bands: meaning of the raw values of its images; `RGB8` if unknown.
        preprocessing: changes that `prepare` made to its images; none if unknown.
        pool: default pooling of its tokens.
        network: the network of timm's that the weights belong to, if ours cannot be it.
        options: options of the third-party program that wrote it, unchecked.
        remarks: facts for the user: "found", place in a third-party file; "passed over", damage of newer
            checkpoints of the run; "unfinished", step of an unfinished run.
    """

    source: str
    tensors: dict[str, Tensor]
    objective: str | None = None
    num_heads: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    geometry: Geometry | None = None
    img_size: tuple[int, int] | None = None
    labels: SeenLabels | None = None
    classes: tuple[str, ...] = ()
    downloaded: Path | None = None
    bands: Bands = RGB8
    preprocessing: Preprocessing = UNCHANGED
    pool: Pool = "cls"
    network: TimmNetwork | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The checkpoint or file; a path that does not exist for timm's models."""
        return self.downloaded or Path(self.source)

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of patches; None if unknown."""
        projection = self.tensors.get("patch_embed.proj.weight")
        if self.geometry:
            return self.geometry.grid_size
        if self.img_size is None or projection is None:
            return None
        height, width = self.img_size
        return height // projection.shape[-1], width // projection.shape[-1]

    def assumes(self, num_heads: int | None) -> str:
        """Describes the assumed number of heads and shape of images; empty if the weights state both."""
        if self.geometry or "blocks.0.norm1.weight" not in self.tensors:
            return ""
        assumed, beside = [] if self.num_heads else [f"num_heads={num_heads}"], HEADS_BESIDE
        positions = self.tensors.get("pos_embed")
        rows = 0 if positions is None or positions.dim() != 3 else positions.shape[1]
        if rows and not self.img_size and isqrt(rows) ** 2 in (rows, rows - 1):
            assumed, beside = [*assumed, "square images"], SIZE_BESIDE
        return f"{' and '.join(assumed)}, which the file does not state; {beside}" if assumed else ""

    @property
    def origin(self) -> str | None:
        """`FOREIGN_ORIGIN` for weights of timm's."""
        return FOREIGN_ORIGIN if self.network else origin_of(self.source)

    def fitted(self, img_size: tuple[int, int], in_chans: int) -> Weights:
        """Returns the weights for training on images of a size; timm fits those of its networks.

        Raises InputError if they do not fit, or `model.name` does not say all about the network.
        """
        if self.network is None:
            return self
        return replace(self, tensors=self.network.fit(self.tensors, self.source, img_size, in_chans))

    @cached_property
    def digest(self) -> str:
        """A digest of all weights, and of what timm knows about its network."""
        digest = hashlib.blake2b(digest_size=16)
        if self.network is not None:
            facts = [self.network.name, dict(self.network.arguments), self.network.images.interpolation]
            digest.update(json.dumps(facts).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().float().contiguous().numpy().data)
        return digest.hexdigest()


def _with_facts(
    source: str, tensors: dict[str, Tensor], facts: Mapping[str, Any], *, pool: Pool, **known: Any
) -> Weights:
    """Takes facts by the names in an encoder file's metadata; `pool` is the default."""
    mean, std, labels, size = (facts.get(name) for name in ("mean", "std", "labels", "img_size"))
    height, width = [size] * 2 if isinstance(size, int) else size or (0, 0)
    return Weights(
        source,
        tensors,
        num_heads=facts.get("num_heads"),
        mean=tuple(mean) if mean else None,
        std=tuple(std) if std else None,
        img_size=(int(height), int(width)) if size else None,
        labels=SeenLabels.model_validate(labels) if labels else None,
        classes=tuple(map(str, facts.get("classes") or facts.get("segments") or ())),
        bands=Bands.of_entry(facts),
        preprocessing=Preprocessing.of_entry(facts),
        pool=facts.get("pool") or pool,
        **known,
    )


def read_weights(name: str) -> Weights:
    """Reads pretrained weights.

    Args:
        name: a run folder, an `encoder.safetensors`, a third-party file (`mae_vit.weights.unwrap`; "FILE@NETWORK"
            takes one of its networks), a folder of transformers or timm, "timm:NAME[@FILE]", or
            "hf:USER/NAME[@REVISION]".

    Raises:
        InputError: if there are no readable weights.
        FetchUnavailable: if the Hub cannot be reached.
    """
    check_exists(name)
    try:
        if name.startswith(TIMM_PREFIX):
            return _read_timm(name)
        if is_hub_name(name):
            return _read_hub(name)
        path, network = split_network(name)
        return _read_folder(path) if path.is_dir() else _read_file(path, network)
    except (InputError, FetchUnavailable):
        raise
    except OSError as error:
        raise InputError(f"cannot read {error.filename or name}: {error_reason(error)}") from None
    except Exception as error:  # any malformed content of an untrusted file
        reason = plain_reason(error) if isinstance(error, ValidationError) else error_reason(error)
        raise InputError(f"{name} cannot be read as weights ({reason}); give another file") from None


def _read_folder(folder: Path) -> Weights:
    """Reads the newest intact checkpoint, which has the objective's parts; else the exported encoder."""
    if (folder / "model.safetensors").exists():
        # Fine-tuned: these are its best weights, which the newest checkpoint may lack.
        return _read_file(folder / "model.safetensors")
    exported = folder / "encoder.safetensors"
    instead = f"; give {exported}" if exported.exists() else ""
    try:
        weights, broken = read_newest(list_checkpoints(folder / "checkpoints"), _read_checkpoint)
    except BrokenCheckpoint as error:
        raise InputError(f"run {folder} cannot be used ({error}){instead}") from None
    if weights is not None:
        step = step_of(Path(weights.source))
        if step == 0:
            newer = str(broken[0]) if broken else "if it was trained, copy the folder again"
            raise InputError(f"run {folder} has only a checkpoint of step 0; {newer}{instead}")
        damage, unfinished = "; ".join(map(str, broken)), _describe_unfinished(folder, step)
        remarks = {"passed over": damage, "unfinished": unfinished}
        return replace(weights, remarks={title: text for title, text in remarks.items() if text})
    ours = next((file for file in (exported, folder / "pytorch_model.bin") if file.exists()), None)
    if (file := ours or file_in(folder)) is not None:
        return _read_file(file)
    hint = f"give {_run_around(folder) or 'a file of weights'}"
    raise InputError(
        f"{folder} is no folder of weights (no checkpoints, encoder.safetensors or model.safetensors); {hint}"
    )


def _run_around(path: Path) -> Path | None:
    """Returns the run folder around a part of its checkpoints; None if there is none."""
    return next((run for run in path.absolute().parents if list_checkpoints(run / "checkpoints")), None)


def _describe_unfinished(run: Path, step: int) -> str:
    """Describes the step of an unfinished run's checkpoint; empty if the run is finished or has no summary."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # damaged or missing
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        if summary["status"] != "done" and step < summary["total_steps"]:
            return f"its weights are of step {step:,} of {summary['total_steps']:,}"
    return ""


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
    model = {key.removeprefix("model."): value for key, value in identity.items() if key.startswith("model.")}
    section = section_class(family_of(model), path)
    known = {key: value for key, value in model.items() if key in section.model_fields}
    geometry = section.model_validate({**known, "init": None}).geometry()
    facts = {name: identity.get(f"data.{name}") for name in ("mean", "std", "bands", "preprocessing")}
    facts |= {"num_heads": getattr(geometry, "num_heads", None), "labels": identity.get(LABELS_SEEN)}
    facts["pool"] = identity.get("finetune.pool") or identity.get("objective.pool")
    return _with_facts(
        str(path),
        {
            name.removeprefix(ENCODER_PREFIX).removeprefix(geometry.holder): value
            for name, value in tensors.items()
        },
        facts,
        pool="mean",
        objective=identity.get("objective.name"),
        geometry=geometry,
    )


def _read_file(path: Path, network: str | None = None, by_timm: TimmNetwork | None = None) -> Weights:
    """Reads the encoder in a file, ours or third-party, in any supported container and naming.

    `network` chooses one of several in it; `by_timm` is the network of timm's, which else its `config.json` names.
    """
    if (path.parent / STATE).is_file() and path.stem not in _WEIGHTS:
        raise InputError(f"{path} is a part of a checkpoint without weights; give {_run_around(path)}")
    metadata, content = read_content(path)
    names, named = [*named_tensors(content)], by_timm is not None
    if not metadata:
        check_whole(path, names)
        by_timm = by_timm or find_beside(path)
        if by_timm is not None and not is_ours(by_timm.model):
            check_values(tensors := unwrapped(content), path)
            return _of_timm(str(path), tensors, by_timm)
    section_class(metadata.get("family") or "vit", path)
    geometry = checked_geometry(geometry_from(metadata), metadata, path)
    if "network" in metadata:  # fine-tuned; patch size 1, as nothing masked its patches
        facts = {"name": metadata["network"], "img_size": metadata["img_size"]}
        section = ENCODERS["network"].model_validate({**facts, "in_chans": len(metadata["mean"])})
        geometry = NetworkGeometry(section.image_hw, 1, section.channels, section.name)
    is_vit = geometry is None or geometry.family == "vit"
    network_in = find_network(content, str(path), network) if is_vit else None
    if network_in is None and not metadata:
        if not names:
            raise InputError(f"{path} has no named tensors; give {FORMS}")
        unknown = str(config_beside(path).get("architecture", ""))
        hint = f"; config.json there names {unknown!r}, which timm does not have; {nearest_timm(unknown)}"
        raise InputError(
            f"{path} has no Vision Transformer with known names, but {', '.join(names[:3])} and others"
            f"{hint if unknown else with_timms_name(str(path))}"
        )
    # A file of ours without an encoder holds a head.
    tensors, where = network_in or (content, "")
    has_decoder = any(name.startswith("decoder_") for name in tensors)
    if not metadata:
        facts = facts_of_timm(by_timm, tensors, path, named=named) if by_timm else facts_beside(path, content)
    return _with_facts(
        str(path) if network is None else f"{path}@{network}",
        tensors,
        metadata or facts,
        pool="mean" if metadata or "fc_norm.weight" in tensors else "cls",
        objective="mae" if has_decoder and not metadata else None,
        options=options_in(content),
        geometry=geometry,
        downloaded=None if network is None else path,
        remarks={"found": where} if where else {},
    )


def _read_hub(name: str) -> Weights:
    """Reads the weights of a repository at the current commit of its revision; safetensors only."""
    repo = parse_hub_name(name)
    path, commit = download(repo, _HUB_FILES)
    pinned = replace(repo, revision=commit)
    if not read_metadata(path):
        for file in CONFIGS:
            with suppress(InputError):  # the repository has no such file
                download(pinned, [file])
    try:
        return replace(_read_file(path), source=str(pinned), downloaded=path)
    except InputError as error:
        raise InputError(f"{repo}: {error}") from None


def _of_timm(source: str, tensors: dict[str, Tensor], network: TimmNetwork) -> Weights:
    """Describes weights of a network that our encoders cannot be."""
    images, facts = network.images, {"mean": network.images.mean, "std": network.images.std}
    geometry = NetworkGeometry(images.img_size, 1, images.in_chans, network.name)
    return _with_facts(source, tensors, facts, pool="mean", geometry=geometry, network=network)


def _read_timm(name: str) -> Weights:
    """Reads "timm:NAME", from the Hub or its cache, or "timm:NAME@FILE"."""
    tagged, file = split_timm(name)
    network = find_timm(tagged)
    if file is not None:
        if file.is_dir():
            files = [file / each for each in _TIMM_FILES]
            file = next((each for each in files if each.is_file()), files[0])
        return replace(_read_file(file, by_timm=network), source=name, downloaded=file)
    repo = network.config.hf_hub_id
    try:
        if repo:
            check_reachable(parse_hub_name(repo), _TIMM_FILES)
        model = timm.create_model(tagged, pretrained=True, num_classes=0)
    except Exception as error:  # no network, no such weights, a broken download
        reason = error_reason(error).split(". ")[0][:160]
        if not network.config.has_weights:
            raise InputError(f"timm has no weights for {tagged!r} ({reason})") from None
        by_hand = (
            f"; or run `hf download {repo} model.safetensors --local-dir DIR` on a machine with network, and give "
            f"{name}@DIR/model.safetensors"
        )
        kind = FetchUnavailable if isinstance(error, FetchUnavailable) else InputError
        raise kind(f"cannot fetch the weights of {name} ({reason}){by_hand if repo else ''}") from None
    if not is_ours(model):
        return _of_timm(name, model.state_dict(), network)
    geometry = timm_geometry(model)
    return _with_facts(
        name,
        with_whole_qkv(model.state_dict()),
        {"mean": network.config.mean, "std": network.config.std, "num_heads": geometry.num_heads},
        pool="mean" if model.global_pool == "avg" else "cls",
        geometry=geometry,
    )
