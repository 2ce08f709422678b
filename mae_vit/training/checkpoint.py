"""Checkpoints that depend on neither world size nor ZeRO stage, and are never torn.

`checkpoints/step-NNNNNNNN/` holds `parameters.safetensors`, a file for each of the
optimizer's slots (`exp_avg.safetensors`, `exp_avg_sq.safetensors`), where there are any
`buffers.safetensors` and `best.safetensors`, and `state.json` (step, optimizer step, loss
scale, step and score of the best, identity of the run, checksums). It is written under
a temporary name and renamed when complete; the file `latest` moves last. Nothing in it
can execute code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from mae_vit.errors import InputError
from mae_vit.training.files import sha256, sync_folder, write_atomically
from mae_vit.training.precision import LossScale
from mae_vit.training.state import Best, TrainState

# What state.json does not say was so before it did.
_SLOTS_BEFORE = ("exp_avg", "exp_avg_sq")
_SLOT = re.compile(r"[a-z_]+")
_NAME = re.compile(r"step-(\d{8,})")
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint read from disk.

    Attributes:
        path: its folder.
        step: optimizer steps done; with the config, the whole position of the run.
        identity: what must not change when the run goes on.
        state: parameters and optimizer state.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    state: TrainState


class BrokenCheckpoint(ValueError):
    """A checkpoint is incomplete or damaged."""


def save_checkpoint(folder: Path, *, step: int, state: TrainState, identity: dict[str, Any]) -> Path:
    """Writes a checkpoint under `folder`; on rank 0 alone.

    Returns:
        The new checkpoint's folder.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    checksums = {}
    parts = {"parameters": state.parameters, **state.slots}
    if state.buffers:
        parts["buffers"] = state.buffers
    if state.best:
        parts["best"] = state.best.tensors
    for part, tensors in parts.items():
        data = save_tensors(tensors)
        checksums[part] = sha256(data)
        write_atomically(partial / f"{part}.safetensors", data)
    described = {
        "format": FORMAT,
        "step": step,
        "optimizer_step": state.optimizer_step,
        "slots": list(state.slots),
        "loss_scale": asdict(state.loss_scale) if state.loss_scale else None,
        "best": {"step": state.best.step, "score": state.best.score} if state.best else None,
        "sha256": checksums,
        "identity": identity,
    }
    write_atomically(partial / "state.json", (json.dumps(described, indent=2) + "\n").encode())
    if final.exists():
        # Saved before a restart that came to this step again: replace it whole.
        shutil.rmtree(final)
    os.rename(partial, final)
    sync_folder(folder)
    write_atomically(folder / "latest", f"{final.name}\n".encode())
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies one checkpoint.

    Raises:
        BrokenCheckpoint: if a part is missing, damaged or of another format.
    """
    try:
        described = json.loads((path / "state.json").read_text())
        if described["format"] != FORMAT:
            raise BrokenCheckpoint(f"{path}: format {described['format']}, this version reads {FORMAT}")
        slots = described.get("slots", _SLOTS_BEFORE)
        if not all(_SLOT.fullmatch(slot) for slot in slots):
            raise BrokenCheckpoint(f"{path}: state.json names odd slots {slots}")
        tensors = {}
        best = described.get("best")
        more = [part for part in ("buffers", "best") if part in described["sha256"]]
        for part in ("parameters", *slots, *more):
            data = (path / f"{part}.safetensors").read_bytes()
            if sha256(data) != described["sha256"][part]:
                raise BrokenCheckpoint(f"{path}: {part}.safetensors is damaged (checksum differs)")
            tensors[part] = load_tensors(data)
        scale = described.get("loss_scale")
        state = TrainState(
            parameters=tensors["parameters"],
            slots={slot: tensors[slot] for slot in slots},
            optimizer_step=int(described["optimizer_step"]),
            loss_scale=LossScale(**scale) if scale else None,
            buffers=tensors.get("buffers", {}),
            best=Best(int(best["step"]), float(best["score"]), tensors["best"]) if best else None,
        )
        return Checkpoint(path, int(described["step"]), dict(described["identity"]), state)
    except BrokenCheckpoint:
        raise
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise BrokenCheckpoint(f"{path}: {name}: {(error.strerror or 'unreadable').lower()}") from None
    except Exception as error:  # any malformed content of an untrusted file
        raise BrokenCheckpoint(f"{path}: not a checkpoint: {type(error).__name__}: {error}") from None


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns complete-looking checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the newest whole checkpoint; a broken one is skipped with a warning.

    Raises:
        InputError: if there are checkpoints and none is whole: starting over silently
            would throw the run away.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return load_checkpoint(path)
        except BrokenCheckpoint as error:
            warnings.warn(f"skipping broken checkpoint: {error}", stacklevel=2)
    if paths:
        raise InputError(f"all {len(paths)} checkpoints in {folder} are broken; --resume never starts over")
    return None


def prune_checkpoints(folder: Path, *, keep_last: int, keep_every: int | None, every_steps: int) -> None:
    """Removes all but the last `keep_last` and, where asked, every `keep_every`-th.

    Counted are those saved every `every_steps`; one between them, saved on a signal, is
    kept only while it is among the last.
    """
    for path in list_checkpoints(folder)[:-keep_last]:
        if keep_every is None or _step(path) % (every_steps * keep_every):
            shutil.rmtree(path, ignore_errors=True)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))
