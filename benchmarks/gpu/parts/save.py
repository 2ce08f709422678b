"""How long training stands still for a checkpoint, of what size, and what it takes of the host's memory."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.parts.sizes import BASE, HUGE, LARGE, TINY, Model
from benchmarks.harness.turns import synchronize
from benchmarks.scaling.saving import build_full, save_rounds

_ROUNDS = 3
_SAMPLED_S = 0.005


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """A process for each model."""
    return [
        Job(f"save {model.name}", (model.name,), _Save(model, scratch), limit_s=150)
        for model in ((TINY,) if tiny else (BASE, LARGE, HUGE))
    ]


@dataclass(frozen=True)
class _Save:
    model: Model
    scratch: Path

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        engine = build_full(self.model.config, self.model.overrides)
        gathered = []
        for _ in range(_ROUNDS):
            synchronize(engine.device)
            begun = time.perf_counter()
            state = engine.gather()
            gathered.append(time.perf_counter() - begun)
            size = sum(
                tensor.nbytes
                for part in (state.parameters, *state.optimizer_states.values())
                for tensor in part.values()
            )
            del state
        folder = self.scratch / "checkpoints"
        with HostMemory() as memory:
            saves = save_rounds(engine, folder, rounds=_ROUNDS)
        emit(
            self.model.name,
            {
                "checkpoint_gb": saves["checkpoint_gb"],
                "gather_s": round(statistics.median(gathered), 6),
                "gather_gb_s": round(size / statistics.median(gathered) / 1e9, 2),
                "stall_s": saves["stall_s"]["median"],
                "write_s": saves["write_s"]["median"],
                "write_gb_s": saves["write_gb_s"],
                "longest_pause_s": saves["longest_pause_while_written_s"]["max"],
                "host_memory_gib": round(memory.most / 2**30, 2),
            },
        )


class HostMemory:
    """The most memory that this process took beyond what it had, sampled by a thread.

    Attributes:
        most: in bytes.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.most = 0
        self._read: Callable[[], int] = lambda: int(psutil.Process().memory_info().rss)
        self._over = threading.Event()

    def __enter__(self) -> HostMemory:
        """Begins to sample."""
        self._before = self._read()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Samples once more, and no longer."""
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            over = self._over.wait(_SAMPLED_S)
            self.most = max(self.most, self._read() - self._before)
            if over:
                return
