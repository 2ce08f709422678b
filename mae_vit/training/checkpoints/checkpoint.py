"""Checkpoints: independent of world size and ZeRO stage, and never half-written.

`checkpoints/step-NNNNNNNN/` holds `parameters.safetensors`, a file for each of the
optimizer's slots (`exp_avg.safetensors`, `exp_avg_sq.safetensors`), `buffers`, `average` and
`best.safetensors` if the run has them, and `state.json` (step, optimizer step, loss
scale, step and score of the best, identity of the run, its ids in experiment trackers,
checksums). It is written under
a temporary name and renamed when complete; the file `latest` moves last. Nothing in it
can execute code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, write_atomically
from mae_vit.runtime.collectives import gather_objects
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.format import (
    FORMAT,
    STATE,
    BrokenCheckpoint,
    as_broken,
    check_part,
    list_checkpoints,
    read_description,
    read_newest,
    read_part,
    step_of,
    write_tensors,
)
from mae_vit.training.engines.state import BestWeights, LossHistory, TrainState
from mae_vit.training.optim.loss_scale import LossScale
from mae_vit.training.outputs.trackers.open import valid_ids

# Values for keys that older state.json files lack.
_SLOTS_BEFORE = ("exp_avg", "exp_avg_sq")
# The longest delay with which a node sees another node's files.
LATE_S = 60
_SLOT = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class CheckpointInfo:
    """A verified checkpoint without its tensors; a run keeps it in memory to its end.

    Attributes:
        path: its folder.
        step: optimizer steps done. With the config it fixes the run's position.
        identity: what must not change when the run resumes.
        course: what the run had met until then.
        trackers: the ids by which experiment trackers resume the run, by tracker.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    course: LossHistory
    trackers: dict[str, str]


@dataclass(frozen=True)
class Checkpoint(CheckpointInfo):
    """A complete checkpoint read from disk.

    Attributes:
        state: parameters and optimizer state.
    """

    state: TrainState


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    state: TrainState,
    identity: dict[str, Any],
    trackers: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Writes a checkpoint under `folder`, on rank 0 only.

    Returns:
        The new checkpoint's folder.

    Raises:
        OSError: if it cannot be written. No part of it remains.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_parts(partial, state, step=step, identity=identity, trackers=dict(trackers))
        if final.exists():
            # A restart reached this step again: replace the earlier checkpoint as a whole.
            shutil.rmtree(final)
        os.rename(partial, final)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_path(folder)
    write_atomically(folder / "latest", f"{final.name}\n".encode())
    return final


def _write_parts(
    folder: Path, state: TrainState, *, step: int, identity: dict[str, Any], trackers: dict[str, str]
) -> None:
    checksums = {}
    parts = {"parameters": state.parameters, **state.optimizer_states}
    if state.buffers:
        parts["buffers"] = state.buffers
    if state.average:
        parts["average"] = state.average
    if state.best:
        parts["best"] = state.best.tensors
    for part, tensors in parts.items():
        checksums[part] = write_tensors(folder / f"{part}.safetensors", tensors)
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
        "trackers": trackers,
    }
    write_atomically(folder / STATE, (json.dumps(described, indent=2) + "\n").encode())


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies one checkpoint.

    Raises:
        BrokenCheckpoint: if a part is missing, damaged or of another format.
    """
    return _read(path, read_part)


def verify_checkpoint(path: Path) -> CheckpointInfo:
    """Verifies one checkpoint as `load_checkpoint` does, in the memory of a small buffer.

    Raises:
        BrokenCheckpoint: if a part is missing, damaged or of another format.
    """
    found = _read(path, check_part)
    return CheckpointInfo(found.path, found.step, found.identity, found.course, found.trackers)


def _read(path: Path, part_of: Callable[[Path, str, dict[str, Any]], dict[str, Tensor]]) -> Checkpoint:
    with as_broken(path):
        described = read_description(path)
        optimizer_states = described.get("slots", _SLOTS_BEFORE)
        if not all(_SLOT.fullmatch(slot) for slot in optimizer_states):
            raise BrokenCheckpoint(f"{path}: state.json names odd slots {optimizer_states}")
        best, scale = described.get("best"), described.get("loss_scale")
        more = [part for part in ("buffers", "average", "best") if part in described["sha256"]]
        tensors = {part: part_of(path, part, described) for part in ("parameters", *optimizer_states, *more)}
        course = _read_course(described.get("course", {}))
        state = TrainState(
            parameters=tensors["parameters"],
            optimizer_states={slot: tensors[slot] for slot in optimizer_states},
            optimizer_step=int(described["optimizer_step"]),
            loss_scale=LossScale(**scale) if scale else None,
            buffers=tensors.get("buffers", {}),
            average=tensors.get("average", {}),
            best=BestWeights(int(best["step"]), float(best["score"]), tensors["best"]) if best else None,
            course=course,
        )
        identity, trackers = dict(described["identity"]), valid_ids(described.get("trackers"))
        return Checkpoint(path, int(described["step"]), identity, course, trackers, state)


def load_together(path: Path, ranks: Ranks) -> TrainState:
    """Reads, on every rank, a checkpoint that rank 0 has verified; collective.

    Network file systems show another node's files some seconds late, so ranks wait for them.

    Raises:
        BrokenCheckpoint: on all ranks, if one still cannot read it after `LATE_S`; the message names the rank.
    """
    found, problem, until = None, None, time.monotonic() + LATE_S
    while found is None:
        try:
            found = load_checkpoint(path)
        except BrokenCheckpoint as error:
            problem = f"rank {ranks.rank} ({socket.gethostname()}) cannot read what rank 0 can: {error}"
            if time.monotonic() > until:
                break
            time.sleep(1)
    problems = filter(None, gather_objects(None if found else problem, ranks))
    if (first := next(problems, None)) is not None:
        raise BrokenCheckpoint(first)
    assert found is not None
    return found.state


def _read_course(told: dict[str, Any]) -> LossHistory:
    return LossHistory(
        skipped=tuple((int(first), int(stop)) for first, stop in told.get("skipped", ())),
        losses=tuple(float(loss) for loss in told.get("losses", ())),
        streak=int(told.get("streak", 0)),
    )


def newest_checkpoint(folder: Path, *, warn: bool = True) -> CheckpointInfo | None:
    """Returns the newest intact checkpoint; skips broken ones, with a warning if `warn` is set.

    Raises:
        InputError: if there are checkpoints and all are broken: a silent restart would
            discard the run.
    """
    try:
        found, broken = read_newest(folder, verify_checkpoint)
    except BrokenCheckpoint as error:
        raise InputError(f"{error}; `--resume never` begins again, and sets this run aside") from None
    for problem in broken if warn else ():
        print(f"warning: skipping broken checkpoint: {problem}", file=sys.stderr)
    return found


def prune_checkpoints(
    folder: Path, *, upto: int, keep_last: int, keep_every: int | None, every_steps: int
) -> None:
    """Removes all but the last `keep_last` up to a step and every `keep_every`-th.

    Removes those of later steps too: the run found them broken or rolled back past them. They
    must not count as kept ones.

    Counted are those saved every `every_steps`; one between them, saved on a signal, is
    kept only while it is among the last.
    """
    paths = list_checkpoints(folder)
    kept = [path for path in paths if step_of(path) <= upto][-keep_last:]
    for path in (path for path in paths if path not in kept):
        step = step_of(path)
        # A rollback before the first save needs step 0.
        if step > upto or keep_every is None or step == 0 or step % (every_steps * keep_every):
            shutil.rmtree(path, ignore_errors=True)
