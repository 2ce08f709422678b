"""A run of a comparison: its identity, its folder, the runs it needs, its command line."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from mae_vit.comparison.config import Overrides, joined, override_words, slug
from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.models.encoder_file import Cost, cost_of_weights
from mae_vit.pretraining.report.run_record import describe_score, last_step
from mae_vit.runtime.locks import is_locked, try_lock
from mae_vit.training.outputs.run_folder import RunFolder

# By path: with several checkouts, runs use the one that the comparison runs in.
_COMMAND = str(Path(__file__).resolve().parents[1] / "cli" / "__main__.py")
PRETRAIN = (_COMMAND, "pretrain")
# All rows train under the same rules: no run may change its batch.
FINETUNE = (_COMMAND, "finetune", "--same-batch")


@dataclass(frozen=True, eq=False)
class RunSpec:
    """One run.

    Attributes:
        name: name in messages; unique in a comparison.
        program: the script that runs it, and its first arguments.
        config: its config file.
        overrides: values by dotted key, apart from those that other runs determine.
        folder: `COMPARISON/ROW/ID8`. It receives the run, its log and its lock.
        id: SHA-1 of all that determines its result.
        inputs: digests of the files and data that it reads, by name.
        weights: its pretrained weights, as `--ckpt` takes them.
        elsewhere: the run folder if it is outside the comparison's. A run that was begun there by hand is the same
            run: a comparison begins by comparing them (`foresee.check_pretraining`).
        pretraining: the run that pretrains the weights.
        choice: tuning runs that choose settings.
        equal_compute: two runs that set the length of this one: the run whose FLOPs of pretraining and fine-tuning it
            shall match, and one of the same network at the usual length, which tells the FLOPs of a step.
        steps: its length if that is known without them; then it does not wait for them.
        flops: what it will take, if that was foreseen.
    """

    name: str
    program: tuple[str, ...]
    config: Path
    overrides: Overrides
    folder: Path
    id: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    elsewhere: Path | None = None
    pretraining: RunSpec | None = None
    choice: Choice | None = None
    equal_compute: tuple[RunSpec, RunSpec] | None = None
    steps: int | None = None
    flops: float | None = None

    @property
    def run_folder(self) -> Path:
        """Where the run writes."""
        return self.elsewhere or self.folder

    @property
    def log(self) -> Path:
        """The file that receives its output."""
        return self.folder / "output.log"

    @cached_property
    def needs(self) -> tuple[RunSpec, ...]:
        """The runs that must be done before it begins."""
        tuning = self.choice.runs if self.choice else ()
        equal = self.equal_compute if self.equal_compute and self.steps is None else ()
        return (*([self.pretraining] if self.pretraining else []), *tuning, *equal)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's `summary.json` so far; empty before the run begins."""
        return RunFolder(self.run_folder).read_summary()

    def is_done(self) -> bool:
        """Returns whether this run has finished successfully."""
        summary = self.summary
        is_it = self.elsewhere is not None or summary.get("run_id") == self.id
        return is_it and summary.get("status") == "done"

    def describe_result(self) -> str:
        """Words the result of a finished run: its score on test images or validation images, or its last loss."""
        summary = self.summary
        loss = summary.get("loss")
        return describe_score(summary) or ("done" if loss is None else f"loss {loss:.4g}")

    @property
    def _claim(self) -> Path:
        return self.folder / ".claim.lock"

    def is_claimed(self) -> bool:
        """Returns whether another process of the comparison runs it."""
        return is_locked(self._claim)

    def claim(self) -> BinaryIO | None:
        """Locks the run for this process; returns None if another process of the comparison runs it.

        Raises:
            InputError: if its folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return try_lock(self._claim)
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written: {error_reason(error)}; give run.dir"
            ) from None

    def determined(self) -> Overrides:
        """Returns the overrides that other runs determine: chosen settings, and the steps of equal compute.

        Raises:
            InputError: if a cost is not known.
        """
        settings = (self.choice.best() or {}) if self.choice else {}
        if self.equal_compute is None:
            return settings
        if self.steps is not None:
            return joined(settings, {"train.steps": self.steps})
        other, usual = self.equal_compute
        costs = [cost_of_run(other.summary).flops, cost_of_weights(other.weights).flops]
        per_step = usual.summary.get("flops_per_step")
        if None in costs or not per_step:
            raise InputError(f'compute_of: the cost of "{other.name}" or "{usual.name}" is not known')
        return joined(settings, {"train.steps": math.ceil(sum(filter(None, costs)) / per_step)})

    def command(self) -> list[str]:
        """Returns the command line; the runs that it needs must be done. Raises InputError for an unknown cost."""
        settings = joined(self.overrides, self.determined())
        weights = ["--ckpt", self.weights] if self.weights else []
        place = [f"run.dir={self.run_folder}", f"run.name={slug(self.name)}"]
        words = [*self.program, "--config", str(self.config), *weights, *override_words(settings), *place]
        return [sys.executable, *words]

    def work(self) -> tuple[float, float] | None:
        """Returns FLOPs done and in total, as the run reports them or as foreseen; None if they are not known."""
        summary = self.summary
        steps, flops = summary.get("total_steps"), summary.get("flops_per_step")
        total = steps * flops if steps and flops else summary.get("scoring_flops", self.flops)
        if summary.get("status") == "done":
            return total or 0.0, total or 0.0
        if total is None:
            return None
        return (last_step(self.run_folder) * flops if flops else 0.0), total


@dataclass(frozen=True, eq=False)
class Choice:
    """Settings to choose from by their scores on validation images.

    Attributes:
        settings: the overrides of each setting, at least one.
        runs: the tuning run of each setting; empty for one setting.
        metric: summary entry that decides.
    """

    settings: tuple[Overrides, ...]
    runs: tuple[RunSpec, ...]
    metric: str

    def scores(self) -> list[float | None]:
        """Returns the score of each setting's run; None until it is done."""
        return [run.summary.get(self.metric) if run.is_done() else None for run in self.runs]

    def best(self) -> Overrides | None:
        """Returns the first setting with the highest score; None until all scores are known."""
        known = [score for score in self.scores() if score is not None]
        if len(known) < len(self.runs):
            return None
        return self.settings[known.index(max(known))] if known else self.settings[0]


def cost_of_run(summary: dict[str, Any]) -> Cost:
    """Reads a run's own cost, without its weights', from `summary.json`."""
    flops, steps = summary.get("flops_per_step"), summary.get("steps")
    return Cost(summary.get("samples"), None if flops is None or steps is None else flops * steps)
