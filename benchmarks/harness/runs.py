"""Real runs as contenders: the whole run path, whose batches wait for their turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.turns import Stopwatch
from mae_vit.config.plan import Plan
from mae_vit.core.batch import Batch
from mae_vit.data.order.skipped_steps import Skipped
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import estimate_costs
from mae_vit.training.checkpoints.resume import run_identity
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.run import run
from mae_vit.training.run_setup import RunSetup


@dataclass(frozen=True)
class InTurns:
    """What a job brings to a run (`mae_vit.training.run_setup.Job`): batches in turns, nothing beside.

    The time of a turn ends when the loop asks for the batch after its last.

    Attributes:
        source: yields this rank's batches.
        pipe: tells rank 0 the turns; None on other ranks, which wait in its collectives.
        device: of the run.
        plan: of the run; its last step is in no turn.
    """

    source: Callable[[], Iterator[Batch]]
    pipe: Connection | None
    device: torch.device
    plan: Plan

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields batches, after the word for each turn."""
        source = self.source()
        if self.pipe is None:
            yield from source
            return
        while steps := self.pipe.recv():
            watch = Stopwatch(self.device)
            for _ in range(steps):
                yield next(source)
            self.pipe.send(watch.per_step(steps))
        yield next(source)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Names nothing."""
        return []

    def held_out(self) -> None:
        """Holds nothing out."""

    def probe(self) -> None:
        """Probes nothing."""

    def views(self) -> None:
        """Draws nothing."""

    def finish(self, step: int, best: BestWeights | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """Leaves nothing."""
        return {}, lambda: None

    def results(self) -> list[str]:
        """Names nothing."""
        return []


def lengths(*, turns: int, steps: int, batch_size: int) -> list[str]:
    """Overrides that set a run's length to its turns and a last step; in between the log alone is written."""
    total = turns * steps + 1
    return [
        *(f"{key}=null" for key in ("train.epochs", "train.samples", "train.warmup_epochs")),
        *(f"checkpoint.every_{unit}=null" for unit in ("epochs", "minutes")),
        *(f"train.steps={total}", "train.warmup_steps=0", f"train.effective_batch_size={batch_size}"),
        "monitor.evaluate_every_epochs=null",
        *(f"checkpoint.every_steps={total}", f"monitor.evaluate_every_steps={total}"),
        "monitor.probe_queries=0",
    ]


def live(
    config: PretrainConfig,
    plan: Plan,
    info: EncoderInfo,
    engine: Engine,
    source: Callable[[], Iterator[Batch]],
    pipe: Connection | None,
    *,
    folder: Path,
    num_classes: int = 0,
) -> None:
    """Runs a job as `pretrain/run.py` does, in a run folder that all its ranks are given."""
    costs = estimate_costs(
        config, info, num_classes=num_classes, batch_size_per_device=plan.batch_size_per_device
    )
    identity = run_identity(config, derived={})
    setup = RunSetup(config, plan, engine, RunFolder(folder), identity, costs, noisy=False)
    # What a run says is no part of the report.
    with redirect_stdout(sys.stderr):
        run(setup, InTurns(source, pipe, engine.device, plan), None)
