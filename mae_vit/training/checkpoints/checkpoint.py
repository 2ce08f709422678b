"""Writes and reads checkpoints. They do not depend on world size or ZeRO stage, and are never half-written.

`checkpoints/step-NNNNNNNN/` holds:

- `parameters.safetensors`;
- one file for each slot of the optimizer (`exp_avg.safetensors`, `exp_avg_sq.safetensors`);
- `buffers`, `average` and `best.safetensors`, if the run has them;
- `state.json`: step, optimizer step, loss scale, step and score of the best weights, loss
  history, identity of the run, checksums.

The folder is written under a temporary name and renamed when it is complete. The file `latest`
changes last. Nothing in a checkpoint can execute code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, write_atomically
from mae_vit.runtime.collectives import gather_objects
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.format import (
    FORMAT,
    STATE,
    BrokenCheckpoint,
    as_broken,
    list_checkpoints,
    read_description,
    read_newest,
    read_part,
    step_of,
    write_tensors,
)
from mae_vit.training.engines.state import BestWeights, LossHistory, TrainState
from mae_vit.training.optim.loss_scale import LossScale

# Seconds within which a node must see another node's files.
LATE_S = 60
_SLOT = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class CheckpointInfo:
    """A verified checkpoint without its tensors; a run keeps it in memory to its end.

    Attributes:
        path: its folder.
        step: optimizer steps done. Step and config determine the position in the data.
        identity: config values and digests that must not change when the run resumes.
        course: loss history up to this step.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    course: LossHistory


@dataclass(frozen=True)
class Checkpoint(CheckpointInfo):
    """A complete checkpoint read from disk.

    Attributes:
        state: parameters and optimizer state.
    """

    state: TrainState


def save_checkpoint(folder: Path, *, step: int, state: TrainState, identity: dict[str, Any]) -> Path:
    """Writes a checkpoint under `folder`, on rank 0 only.

    Returns:
        The new checkpoint's folder.

    Raises:
        OSError: if it cannot be written. Its partial files are removed.
    """
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
    write_atomically(folder / "latest", f"{final.name}\n".encode())
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
    """Verifies one checkpoint as `load_checkpoint` does, but keeps no tensors in memory.

    Raises:
        BrokenCheckpoint: if a part is missing, damaged or of another format.
    """
    checkpoint = load_checkpoint(path, load=False)
    return CheckpointInfo(checkpoint.path, checkpoint.step, checkpoint.identity, checkpoint.course)


def load_checkpoint(path: Path, *, load: bool = True) -> Checkpoint:
    """Reads and verifies one checkpoint; without its tensors if `load` is False.

    Raises:
        BrokenCheckpoint: if a part is missing, damaged or of another format.
    """
    with as_broken(path):
        described = read_description(path)
        optimizer_states = described["slots"]
        if not all(_SLOT.fullmatch(slot) for slot in optimizer_states):
            raise BrokenCheckpoint(f"{path}: state.json names odd slots {optimizer_states}")
        best, scale = described.get("best"), described.get("loss_scale")
        more = [part for part in ("buffers", "average", "best") if part in described["sha256"]]
        parts = ("parameters", *optimizer_states, *more)
        tensors = {part: read_part(path, part, described, load=load) for part in parts}
        losses = described.get("course", {})
        course = LossHistory(
            skipped=tuple((int(first), int(stop)) for first, stop in losses.get("skipped", ())),
            losses=tuple(float(loss) for loss in losses.get("losses", ())),
            streak=int(losses.get("streak", 0)),
        )
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
        return Checkpoint(path, int(described["step"]), dict(described["identity"]), course, state)


def load_together(path: Path, ranks: Ranks) -> TrainState:
    """Reads a checkpoint on every rank after rank 0 has verified it; collective.

    A network file system may show another node's files seconds late, so a rank retries for `LATE_S`.

    Raises:
        BrokenCheckpoint: on all ranks, if one rank still cannot read it; the message names the rank.
    """
    checkpoint, problem, until = None, None, time.monotonic() + LATE_S
    while checkpoint is None:
        try:
            checkpoint = load_checkpoint(path)
        except BrokenCheckpoint as error:
            problem = f"rank {ranks.rank} ({socket.gethostname()}) cannot read what rank 0 can: {error}"
            if time.monotonic() > until:
                break
            time.sleep(1)
    problems = filter(None, gather_objects(None if checkpoint else problem, ranks))
    if (first := next(problems, None)) is not None:
        raise BrokenCheckpoint(first)
    assert checkpoint is not None
    return checkpoint.state


def newest_checkpoint(folder: Path, *, warn: bool = True) -> CheckpointInfo | None:
    """Returns the newest intact checkpoint. Skips broken ones, with a warning if `warn` is set.

    Raises:
        InputError: if there are checkpoints and all are broken. A silent restart would discard the run.
    """
    try:
        newest, broken = read_newest(folder, verify_checkpoint)
    except BrokenCheckpoint as error:
        raise InputError(f"{error}; `--resume never` begins again, and sets this run aside") from None
    for problem in broken if warn else ():
        print(f"warning: skipping broken checkpoint: {problem}", file=sys.stderr)
    return newest


def prune_checkpoints(
    folder: Path, *, upto: int, keep_last: int, keep_every: int | None, every_steps: int
) -> None:
    """Removes checkpoints, except the last `keep_last` up to step `upto` and every `keep_every`-th.

    Checkpoints of later steps are removed too: the run found them broken or rolled back past them,
    so they must not count as kept.

    `keep_every` counts the saves at multiples of `every_steps`. A checkpoint between these, saved on
    a signal, stays only while it is among the last `keep_last`.
    """
    paths = list_checkpoints(folder)
    kept = [path for path in paths if step_of(path) <= upto][-keep_last:]
    for path in (path for path in paths if path not in kept):
        step = step_of(path)
        # Step 0 is not a counted save: only a rollback before the first save needs it.
        if step > upto or keep_every is None or step == 0 or step % (every_steps * keep_every):
            shutil.rmtree(path, ignore_errors=True)
