"""The parts of a run that pretraining and fine-tuning pass to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.batch import Batch
from mae_vit.data.order.order import Skipped
from mae_vit.training.checkpoints.resume import Identity
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.evals import HeldOut, OnlineProbe, Views
from mae_vit.training.outputs.run_folder import RunFolder


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run, checked and built.

    Attributes:
        config: config of the run.
        plan: the config's derived values, such as `total_steps`.
        engine: computes the steps.
        folder: receives all output.
        identity: values that must not change when the run resumes.
        costs: FLOPs and memory of a step.
        noisy: whether layers draw noise (dropout, drop-path).
        selects: held-out metric that chooses the best weights; None for the last weights.
        begins_from: description of the initial weights, for the log.
        advice: line to print if no images are held out.
        plan_text: content of `plan.txt`; empty for none.
    """

    config: Config
    plan: Plan
    engine: Engine
    folder: RunFolder
    identity: Identity
    costs: Estimate
    noisy: bool
    selects: str | None = None
    begins_from: str = "scratch"
    advice: str = ""
    plan_text: str = ""

    def summary_facts(self) -> dict[str, Any]:
        """Returns the summary entries that a comparison reads, and notes on departures from the config."""
        return {
            "parameters": self.costs.parameters,
            "epochs": self.plan.total_steps / self.plan.steps_per_epoch,
            "flops_per_step": self.costs.flops_per_image * self.plan.effective_batch_size,
            **({"notes": list(self.plan.notes)} if self.plan.notes else {}),
        }


class Job(Protocol):
    """The job-specific parts of a run: data, evaluation, outputs. All ranks call every method."""

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Describes the samples of a data step over all ranks."""

    def held_out(self) -> HeldOut | None:
        """Returns the held-out images; None without any."""

    def probe(self) -> OnlineProbe | None:
        """Returns the online probe; None without one."""

    def views(self) -> Views | None:
        """Returns the function that draws views of the encoder; None if none are due."""

    def finish(
        self, engine: Engine, folder: RunFolder, step: int, best: BestWeights | None
    ) -> tuple[dict[str, Any], Callable[[], None], list[str]]:
        """Returns entries of the summary, a function that writes result files, and lines to print about them.

        Only rank 0 calls the function. It is not collective, so an error on a full disk leaves no rank waiting.
        """
