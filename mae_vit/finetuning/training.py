"""A fine-tuning run that trains a network: what the trainer asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mae_vit.config.plan import Plan
from mae_vit.finetuning.models.build import Trainable
from mae_vit.finetuning.results import MaskResults, Results
from mae_vit.finetuning.setup import Setup
from mae_vit.models.encoders.base import LoadReport
from mae_vit.objectives.config import PAIRS
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.state import BestWeights, weights_of
from mae_vit.training.evals import HeldOut
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.setup import TrainingSetup


@dataclass(frozen=True)
class Training(Setup, TrainingSetup):
    """The setup of a mode that trains a network on augmented images, by the training loop."""

    plan: Plan

    @property
    def batch_size(self) -> int:
        """Number of images per micro-batch."""
        return self.plan.batch_size_per_device

    @property
    def unit(self) -> int:
        """Number of consecutive rows that belong together."""
        pairs = self.config.finetune.mixup or self.config.finetune.cutmix
        return PAIRS.unit if pairs else super().unit

    @property
    def selects(self) -> str | None:
        """The metric that chooses the epoch, if there are images for it."""
        return self.config.mode.metric if len(self.data.held_out) else None

    @property
    def derived(self) -> dict[str, Any]:
        """Values outside the config that must not change when the run resumes: data, weights, evaluation."""
        if not len(self.data.held_out):
            return super().derived
        # When held-out images are measured decides which weights can be chosen.
        return {**super().derived, "finetune.evaluate_every_steps": self.plan.evaluate_every_steps}

    def load(self, model: Trainable) -> LoadReport | None:
        """Loads the pretrained weights into a fresh network; None if there are none.

        Raises:
            InputError: if they do not fit; names the difference.
        """
        if self.pretrained is None:
            return None
        return model.load(self.pretrained.fitted(self.config.model.image_hw, self.config.model.channels))

    def held_out(self) -> HeldOut | None:
        """Returns the images that choose the epoch."""
        return self.data.held_out_batches(self.ranks, batch_size=self.batch_size)

    def finish(
        self, engine: Engine, folder: RunFolder, step: int, best: BestWeights | None
    ) -> tuple[dict[str, Any], Callable[[], None], list[str]]:
        """Tests the chosen weights, or the last ones if none were chosen; collective."""
        if best is None:
            with engine.full_weights():
                best = BestWeights(step, float("nan"), weights_of(engine.objective))
        kind = MaskResults if self.config.mode.labels == "mask" else Results
        outcome = kind(self, folder, engine.module.context)
        # A network of its own: ZeRO 3 keeps the trained one in parts.
        measured, write = outcome.measure(self.build(), best)
        summary = {"labels_seen_by_start": self.label_overlap, **measured}
        return summary, write, outcome.lines(summary)
