"""What the trainer and a run's start ask of a job: its config, resolved for these ranks, with network and data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.batch import Batch
from mae_vit.data.order.order import Skipped
from mae_vit.data.training_data import TrainingData
from mae_vit.objectives.objective import Task
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine, optimizer_options
from mae_vit.training.engines.cost import Estimate, MetaStep
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.identity import Identity, run_identity
from mae_vit.training.optim import OptimizerOptions
from mae_vit.training.outputs.run_folder import RunFolder


@dataclass(frozen=True)
class Setup(ABC):
    """A config, resolved for these ranks. Pretraining and fine-tuning add their parts."""

    config: Config
    ranks: Ranks
    device: torch.device
    data: TrainingData

    @property
    def derived(self) -> dict[str, Any]:
        """Values outside the config that must not change when the run resumes."""
        return self.data.identity

    @property
    def identity(self) -> Identity:
        """What must not change when the run resumes."""
        return run_identity(self.config, derived=self.derived)

    @abstractmethod
    def build(self) -> Task:
        """Builds network and loss, with fresh weights from the run's seed."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Name of the initial weights."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of images per batch, of a run that trains per micro-batch."""

    @property
    def optimizer(self) -> OptimizerOptions:
        """The optimizer with its options."""
        return optimizer_options(self.config)

    @property
    def meta_step(self) -> MetaStep:
        """A step on one batch, on tensors without content."""
        shape = (self.config.model.channels, *self.config.model.image_hw)
        recomputed, dtype = self.config.train.activation_checkpointing, self.data.bands.torch_dtype
        return MetaStep(self.build, shape, self.batch_size, recomputed, dtype)

    @cached_property
    def costs(self) -> Estimate:
        """Estimates the cost of a step."""
        slots, averaged = len(self.optimizer.optimizer_states), self.config.train.ema_decay is not None
        return self.meta_step.estimate(optimizer_slots=slots, averaged=averaged)


@dataclass(frozen=True)
class TrainingSetup(Setup):
    """The setup of a run that the trainer trains, with what it asks of the job. All ranks call every method.

    Attributes:
        selects: held-out metric that chooses the best weights; None for the last weights.
        advice: line to print if no images are held out.
    """

    plan: Plan

    @property
    def batch_size(self) -> int:  # noqa: D102
        return self.plan.batch_size_per_device

    @property
    def unit(self) -> int:
        """Number of consecutive rows that belong together."""
        return self.config.data.repeats

    @property
    def selects(self) -> str | None:  # noqa: D102
        return None

    @property
    def advice(self) -> str:  # noqa: D102
        return ""

    def build_engine(self, model: Task) -> Engine:
        """Builds the config's engine for a network."""
        where = (self.ranks, self.device)
        return build_engine(self.config, self.plan, model, *where, costs=self.costs, optimizer=self.optimizer)

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        return self.data.batches(self.ranks, self.plan, start_step, skipped)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Describes the samples of a data step over all ranks."""
        return self.data.samples_of(data_step)

    @abstractmethod
    def held_out(self) -> HeldOut | None:
        """Returns the held-out images; None without any."""

    def probe(self) -> OnlineProbe | None:
        """Returns the online probe; None without one."""
        return None

    @abstractmethod
    def finish(
        self, engine: Engine, folder: RunFolder, step: int, best: BestWeights | None
    ) -> tuple[dict[str, Any], Callable[[], None], list[str]]:
        """Returns entries of the summary, a function that writes result files, and lines to print about them.

        Only rank 0 calls the function. It is not collective, so an error on a full disk leaves no rank waiting.
        """
