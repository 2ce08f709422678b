"""What a checkpoint of real size costs: how long training stands still, and what is written behind it."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mae_vit.config.geometry import resolve_encoder
from mae_vit.config.load import load_config
from mae_vit.config.schema import CheckpointSection
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import build_objective
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.build import optimizer_options
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.engines.torch_engine import TorchEngine

ROOT = Path(__file__).resolve().parents[2]
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HASHED_BYTES = 1 << 28


def save_states(names: tuple[str, ...], scratch: Path, *, rounds: int) -> dict[str, Any]:
    """Saves the states of configs in `configs/`, `rounds` times each."""
    return {name: save_rounds(build_full(name), scratch / name, rounds=rounds) for name in names}


def disk_and_hash(scratch: Path) -> dict[str, float]:
    """What the machine gives, in GB/s: one file written and forced to the disk, and SHA-256 on one core."""
    data = os.urandom(_HASHED_BYTES)
    begun = time.perf_counter()
    hashlib.sha256(data).digest()
    hashed = time.perf_counter()
    with (scratch / "probe").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    (scratch / "probe").unlink()
    return {
        "write_gb_s": round(_HASHED_BYTES / (written - hashed) / 1e9, 2),
        "sha256_gb_s": round(_HASHED_BYTES / (hashed - begun) / 1e9, 2),
    }


def build_full(name: str, overrides: Sequence[str] = ()) -> TorchEngine:
    """An engine of a config's objective after one update: every slot of the optimizer is there."""
    config = load_config(PretrainConfig, ROOT / "configs" / f"{name}.yaml", list(overrides))
    info = resolve_encoder(config.model, mean=_IMAGENET[0], std=_IMAGENET[1], objective=config.objective.name)
    objective = build_objective(config, info, num_classes=0)
    options = StepOptions(
        optimizer=optimizer_options(config),
        clip_grad=None,
        precision="bf16",
        batch_size_per_device=1,
        accumulation=1,
    )
    engine = TorchEngine(objective, options, Ranks(), find_device(Ranks()))
    for parameter in engine.trainable.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    engine.step(1e-4)
    return engine


def save_rounds(engine: TorchEngine, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Saves an engine's state some times; each write is waited for, as a run with time between saves."""
    options = CheckpointSection(every_steps=1, keep_last=1)
    saver = Saver(engine, folder, options, identity={}, every_steps=1, say=print)
    stalls, writes, pauses = [], [], []
    for step in range(1, rounds + 1):
        saver.stall_s = 0.0
        saver.save(step, None, LossHistory(), wait=False)
        begun = time.perf_counter()
        pauses.append(_longest_pause())
        writes.append(time.perf_counter() - begun)
        saver.wait()
        stalls.append(saver.stall_s)
    size = sum(file.stat().st_size for file in (folder / f"step-{rounds:08d}").iterdir())
    shutil.rmtree(folder)
    return {
        "checkpoint_gb": round(size / 1e9, 3),
        # On a GPU the first save allocates the pinned memory that the others use again.
        "first_stall_s": round(stalls[0], 3),
        "stall_s": _spread(stalls),
        "write_s": _spread(writes),
        "longest_pause_while_written_s": _spread(pauses),
        "write_gb_s": round(size / statistics.median(writes) / 1e9, 3),
    }


def _longest_pause() -> float:
    """How long at most a thread beside the one that saves stood still, until that is through.

    Training goes on in such a thread: what holds the interpreter's lock holds it up as well.
    """
    longest, last = 0.0, time.perf_counter()
    while any(thread.name == "saver" for thread in threading.enumerate()):
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }
