"""Engines at size: runs of ViT-B on the torch engine and on DeepSpeed, in turns of many steps between two waits.

Micro-batches of 32 images show what a host that waits costs, those of 256 what it does to computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import ENGINES, run_contenders
from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.parts.sizes import BASE, PRECISION, TINY, Model
from benchmarks.harness.turns import paired, summarize, take_turns
from benchmarks.harness.workloads import ROOT

_FIRST = next(iter(ENGINES))
_EAGER, _COMPILED = "eager", "compiled"


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """A job for each micro-batch, eager and compiled."""
    model, sizes, turns = (TINY, (4, 8), _Turns(1, 2)) if tiny else (BASE, (32, 256), _Turns(5, 20))
    settings = [(how, size) for how in (_EAGER, _COMPILED) for size in sizes]
    return [
        Job(
            f"{model.name} {how}, micro-batch {size}",
            tuple(_key(model, size, how, engine) for engine in ENGINES),
            _Engines(model, size, how, turns),
            limit_s=180,
        )
        for how, size in settings
    ]


@dataclass(frozen=True)
class _Turns:
    rounds: int
    steps: int


def _key(model: Model, size: int, how: str, engine: str) -> str:
    return f"{model.name} x {size} {how} {engine}"


@dataclass(frozen=True)
class _Engines:
    model: Model
    size: int
    how: str
    turns: _Turns

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        compiled = str(self.how == _COMPILED).lower()
        lives = run_contenders(
            ROOT / "configs" / f"{self.model.config}.yaml",
            [*self.model.overrides, f"train.compile={compiled}"],
            engines=list(ENGINES),
            batch_size=self.size,
            precision=PRECISION,
            threads=1,
            turns=self.turns.rounds + 1,
            steps=self.turns.steps,
        )
        # All of them, whatever is wanted: a turn alone has nothing to be compared with.
        times = take_turns(lives, rounds=self.turns.rounds, steps=self.turns.steps)
        for engine, values in times.items():
            step = summarize(values, 2)
            over = summarize(paired(values, times[_FIRST], lambda value, first: value / first))
            emit(
                _key(self.model, self.size, self.how, engine),
                {
                    "images_per_s": round(self.size / step["median"] * 1e3, 1),
                    "ms_per_step": step["median"],
                    "ms_range": step["range"],
                    f"time_over_{_FIRST}": over["median"],
                    "steps_per_turn": self.turns.steps,
                },
            )
