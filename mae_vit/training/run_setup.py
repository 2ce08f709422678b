"""What a job hands to training: pretraining and fine-tuning bring the same things."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.batch import Batch
from mae_vit.data.order.skipped_steps import Skipped
from mae_vit.training.checkpoints.resume import Identity
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.evals import HeldOut, OnlineProbe, Views
from mae_vit.training.outputs.run_folder import RunFolder


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run, all of them checked and built.

    Attributes:
        config: of the run.
        plan: its numbers.
        engine: takes the steps.
        folder: where it leaves what it makes.
        identity: what must not change when it goes on.
        costs: what its steps cost.
        noisy: whether layers draw noise (dropout, drop-path).
        selects: the name of the held-out metric by which the best weights are kept; None
            for the last weights.
        begins_from: what a fresh start begins from, for people.
        advice: said where no images are held out.
        judge: looks at a line of metrics, and returns what is to be said of it, if anything.
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
    judge: Callable[[Mapping[str, Any]], str | None] | None = None

    def summary_facts(self) -> dict[str, Any]:
        """What a comparison of runs needs of each."""
        return {
            "parameters": self.costs.parameters,
            "epochs": self.plan.total_steps / self.plan.steps_per_epoch,
            "flops_per_step": self.costs.flops_per_image * self.plan.effective_batch_size,
        }


class Job(Protocol):
    """What pretraining and fine-tuning do each in their own way; all ranks call it alike."""

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Names the samples of a step of the data order, over all ranks, for people."""

    def held_out(self) -> HeldOut | None:
        """Held-out images, None where there are none."""

    def probe(self) -> OnlineProbe | None:
        """The online probe, None where there is none."""

    def views(self) -> Views | None:
        """What draws views of the encoder, None where none are asked for."""

    def finish(self, step: int, best: BestWeights | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """Finds what a finished run leaves; returns what goes into its summary, and what writes the rest on rank 0.

        That write calls nothing collective: a full disk on one node leaves no rank waiting.
        """

    def results(self) -> list[str]:
        """Names what was written, for people, on rank 0."""
