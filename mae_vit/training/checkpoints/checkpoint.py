"""Writes and reads checkpoints. They do not depend on world size or ZeRO stage, and are never half-written.

`checkpoints/step-NNNNNNNN/` holds:

- `parameters.safetensors`;
- one file for each slot of the optimizer (`exp_avg.safetensors`, `exp_avg_sq.safetensors`);
- `buffers`, `average` and `best.safetensors`, if the run has them;
- `state.json`: step, optimizer step, loss scale, step and score of the best weights, loss
  history, identity of the run, checksums.

The folder is written under a temporary name and renamed when it is complete. Nothing in a
checkpoint can execute code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from mae_vit.core.errors import InputError, RemoteUnavailable
from mae_vit.core.files import fsync_path, replacing, write_atomically
from mae_vit.data.shards.dataset_json import file_digest
from mae_vit.runtime.ranks import Ranks, gather_objects
from mae_vit.training.engines.state import BestWeights, LossHistory, LossScale, TrainState

_NAME = re.compile(r"step-\d{8,}")
FORMAT = 1
# Every checkpoint folder has this file.
STATE = "state.json"
# Identity key: the labels that the weights were trained on (`seen_labels.SeenLabels`), or None.
LABELS_SEEN = "labels_seen"
# Identity key: the training cost of the pretrained weights.
COST_BEFORE = "cost_before"
HISTORY = (LABELS_SEEN, COST_BEFORE)
# Seconds within which a node must see another node's files.
LATE_S = 60
Found = TypeVar("Found")


class BrokenCheckpoint(ValueError):
    """A checkpoint is incomplete or damaged."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the folders with a checkpoint's name, oldest first."""
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if path.is_dir() and is_checkpoint_name(path.name)]
    return sorted(folders, key=step_of)


def is_checkpoint_name(name: str) -> bool:
    """Returns whether a folder of this name is a checkpoint's."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """Returns the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def read_newest(
    paths: list[Path], read: Callable[[Path], Found]
) -> tuple[Found | None, list[BrokenCheckpoint]]:
    """Reads the newest intact checkpoint, or None, and the errors of newer ones; raises BrokenCheckpoint if all are."""
    broken = list[BrokenCheckpoint]()
    for path in reversed(paths):
        try:
            return read(path), broken
        except BrokenCheckpoint as error:
            broken.append(error)
    if paths:
        raise BrokenCheckpoint(f"all {len(paths)} checkpoints in {paths[0].parent} are broken: {broken[0]}")
    return None, broken


def newest_before(folder: Path, step: int | None, read: Callable[[Path], Found]) -> Found | None:
    """Reads the newest intact checkpoint, before `step` if it is given; None if there is none."""
    for path in reversed(list_checkpoints(folder)):
        if step is None or step_of(path) < step:
            with suppress(BrokenCheckpoint):
                return read(path)
    return None


def read_description(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's `state.json`; within `as_broken`, every error is BrokenCheckpoint."""
    described: dict[str, Any] = json.loads((path / STATE).read_text())
    if described["format"] != FORMAT:
        raise BrokenCheckpoint(f"{path}: format {described['format']}, but this version reads {FORMAT}")
    return described


def read_part(path: Path, part: str, described: dict[str, Any], *, load: bool = True) -> dict[str, Tensor]:
    """Verifies one part, such as "parameters", and reads its tensors if `load` is set. Call it in `as_broken`."""
    file = path / f"{part}.safetensors"
    data = file.read_bytes() if load else b""
    digest = hashlib.sha256(data).hexdigest() if load else file_digest(file)
    if digest != described["sha256"][part]:
        raise BrokenCheckpoint(f"{path}: {part}.safetensors is damaged (checksum differs)")
    return load_tensors(data) if load else {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes CPU tensors atomically, to the disk; returns the file's SHA-256. Raises OSError, without a partial file.

    safetensors' `save` would hold the GIL while it copies, which stops training for a second per GB.
    """
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        try:
            save_file(contiguous, partial)
        except SafetensorError as error:
            # The saver checks `errno` for a full disk; safetensors gives it only in its message.
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        digest = file_digest(partial)
    fsync_path(path.parent)
    return digest


@contextmanager
def as_broken(path: Path) -> Iterator[None]:
    """Turns every error from an untrusted checkpoint into BrokenCheckpoint."""
    try:
        yield
    except BrokenCheckpoint:
        raise
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise BrokenCheckpoint(f"{path}: {name}: {(error.strerror or 'unreadable').lower()}") from None
    except Exception as error:  # any malformed content of an untrusted file
        raise BrokenCheckpoint(f"{path}: not a checkpoint: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class CheckpointInfo:
    """A verified checkpoint without its tensors; a run keeps it in memory to its end.

    Attributes:
        step: optimizer steps done. Step and config determine the position in the data.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    course: LossHistory


@dataclass(frozen=True)
class Checkpoint(CheckpointInfo):
    """A complete checkpoint read from disk."""

    state: TrainState


def save_checkpoint(folder: Path, *, step: int, state: TrainState, identity: dict[str, Any]) -> Path:
    """Writes a checkpoint under `folder`, on rank 0; returns its folder. Raises OSError and removes partial files."""
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_parts(partial, state, step=step, identity=identity)
        if final.exists():
            # The run reached this step again after a restart: replace the whole earlier checkpoint.
            shutil.rmtree(final)
        os.rename(partial, final)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_path(folder)
    return final


def _write_parts(folder: Path, state: TrainState, *, step: int, identity: dict[str, Any]) -> None:
    extras = {"buffers": state.buffers, "average": state.average, "best": state.best and state.best.tensors}
    parts = {"parameters": state.parameters, **state.optimizer_states}
    parts |= {name: tensors for name, tensors in extras.items() if tensors}
    checksums = {
        part: write_tensors(folder / f"{part}.safetensors", tensors) for part, tensors in parts.items()
    }
    described = {
        "format": FORMAT,
        "step": step,
        "optimizer_step": state.optimizer_step,
        "slots": list(state.optimizer_states),
        "loss_scale": asdict(state.loss_scale) if state.loss_scale else None,
        "best": {"step": state.best.step, "score": state.best.score} if state.best else None,
        "course": asdict(state.course),
        "sha256": checksums,
        "identity": identity,
    }
    write_atomically(folder / STATE, (json.dumps(described, indent=2) + "\n").encode())


def verify_checkpoint(path: Path) -> CheckpointInfo:
    """Verifies one checkpoint as `load_checkpoint` does, but keeps no tensors in memory."""
    checkpoint = load_checkpoint(path, load=False)  # it has a state, which would stay alive with it
    return CheckpointInfo(checkpoint.path, checkpoint.step, checkpoint.identity, checkpoint.course)


def described_checkpoint(path: Path, described: dict[str, Any]) -> CheckpointInfo:
    """Returns a checkpoint as its `state.json` describes it, without reading other files. Call it in `as_broken`."""
    losses = described.get("course", {})
    course = LossHistory(
        skipped=tuple((int(first), int(stop)) for first, stop in losses.get("skipped", ())),
        losses=tuple(float(loss) for loss in losses.get("losses", ())),
        streak=int(losses.get("streak", 0)),
    )
    return CheckpointInfo(path, int(described["step"]), dict(described["identity"]), course)


def load_checkpoint(path: Path, *, load: bool = True) -> Checkpoint:
    """Reads and verifies one checkpoint, without its tensors if `load` is False; raises BrokenCheckpoint."""
    with as_broken(path):
        described = read_description(path)
        optimizer_states = described["slots"]
        if not all(re.fullmatch(r"[a-z_]+", slot) for slot in optimizer_states):
            raise BrokenCheckpoint(f"{path}: state.json names odd slots {optimizer_states}")
        best, scale = described.get("best"), described.get("loss_scale")
        more = [part for part in ("buffers", "average", "best") if part in described["sha256"]]
        parts = ("parameters", *optimizer_states, *more)
        tensors = {part: read_part(path, part, described, load=load) for part in parts}
        info = described_checkpoint(path, described)
        state = TrainState(
            parameters=tensors["parameters"],
            optimizer_states={slot: tensors[slot] for slot in optimizer_states},
            optimizer_step=int(described["optimizer_step"]),
            loss_scale=LossScale(**scale) if scale else None,
            buffers=tensors.get("buffers", {}),
            average=tensors.get("average", {}),
            best=BestWeights(int(best["step"]), float(best["score"]), tensors["best"]) if best else None,
            course=info.course,
        )
        return Checkpoint(path, info.step, info.identity, info.course, state)


def load_together(path: Path, ranks: Ranks, bring: Callable[[Path], Path]) -> TrainState:
    """Reads a checkpoint on every rank after rank 0 has verified it; collective.

    `bring` returns another rank's folder of it, or raises OSError. A network file system may show another node's files
    seconds late, so a rank retries for `LATE_S`. Raises BrokenCheckpoint or RemoteUnavailable on all ranks, if one rank
    still cannot read it; the message names the rank.
    """
    checkpoint, until = None, time.monotonic() + LATE_S
    problem: Exception | None = None
    while checkpoint is None:
        place = None
        try:
            place = bring(path) if ranks.rank else path
            checkpoint = load_checkpoint(place)
        except (BrokenCheckpoint, OSError) as error:
            advice = "; share the folder" if place == path else ""
            kind = RemoteUnavailable if isinstance(error, RemoteUnavailable) else BrokenCheckpoint
            problem = kind(
                f"rank {ranks.rank} ({socket.gethostname()}) cannot read what rank 0 can{advice} ({error})"
            )
            if time.monotonic() > until:
                break
            time.sleep(1)
    problems = filter(None, gather_objects(None if checkpoint else problem, ranks))
    if (first := next(problems, None)) is not None:
        raise first
    assert checkpoint is not None
    return checkpoint.state


def newest_checkpoint(folder: Path, *, warn: bool = True) -> CheckpointInfo | None:
    """Returns the newest intact checkpoint. Skips broken ones, with a warning if `warn` is set.

    Raises InputError if there are checkpoints and all are broken: a silent restart would discard the run.
    """
    try:
        newest, broken = read_newest(list_checkpoints(folder), verify_checkpoint)
    except BrokenCheckpoint as error:
        raise InputError(str(error)) from None
    for problem in broken if warn else ():
        print(f"warning: skipping broken checkpoint: {problem}", file=sys.stderr)
    return newest


def expired_checkpoints(
    paths: list[Path], *, upto: int, keep_last: int, keep_every: int | None, every_steps: int
) -> Iterator[Path]:
    """Yields checkpoints, except the last `keep_last` up to step `upto` and every `keep_every`-th save of the plan.

    `paths` are all, oldest first. Those of later steps must not count as kept: the run found them broken or rolled back
    past them. One between multiples of `every_steps`, saved on a signal, stays only while it is among the last
    `keep_last`.
    """
    kept = [path for path in paths if step_of(path) <= upto][-keep_last:]
    for path in (path for path in paths if path not in kept):
        step = step_of(path)
        # Step 0 is not a counted save: only a rollback before the first save needs it.
        if step > upto or keep_every is None or step == 0 or step % (every_steps * keep_every):
            yield path
