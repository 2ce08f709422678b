"""A checked config with its data and weights, in any mode: network, costs, identity, labels that weights have seen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mae_vit.config.plan import Plan
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.build import Trainable, build_classifier, build_segmenter
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.training import setup
from mae_vit.training.checkpoints.checkpoint import LABELS_SEEN
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.identity import Identity
from mae_vit.training.optim import EMBEDDINGS, OptimizerOptions
from mae_vit.weights.load import warn_normalization_differs
from mae_vit.weights.read import Weights
from mae_vit.weights.seen_labels import Overlap, SeenLabels

# Largest batch of frozen encoders, unless the config sets one.
_MOST_ENCODED = 256


@dataclass(frozen=True)
class Setup(setup.Setup):
    """A config, resolved for these ranks and data. As it is, the setup of a mode on frozen features.

    Attributes:
        pretrained: its pretrained weights; None for scratch.
        info: geometry and normalization of the encoder; None for a network with a head of its own.
        plan: numbers of its training steps, for a linear probe those at rate factor 1; None if nothing trains.
    """

    config: FinetuneConfig
    data: FinetuneData
    pretrained: Weights | None
    info: EncoderInfo | None
    plan: Plan | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the run departs from its config."""
        return self.plan.notes if self.plan else ()

    @property
    def origin(self) -> str | None:
        """Who trained the pretrained weights, if timm has them."""
        return self.pretrained.origin if self.pretrained else None

    @property
    def source(self) -> str:
        """Name of the initial weights."""
        return self.config.finetune.start or ("scratch" if self.config.mode.augment else "random weights")

    def build(self) -> Trainable:
        """Builds network and loss, with fresh weights from the run's seed."""
        if self.config.mode.labels == "mask":
            return build_segmenter(self.config, self.data, self.info)
        return build_classifier(self.config, self.data, self.info)

    def warn_of_normalization(self) -> None:
        """Warns if images are normalized otherwise than in the training of the weights."""
        if self.pretrained is not None:
            warn_normalization_differs(self.pretrained, self.data.mean, self.data.std, self.data.bands)

    @property
    def batch_size(self) -> int:
        """Number of images per batch."""
        train = self.config.train
        return train.batch_size_per_device or min(_MOST_ENCODED, train.effective_batch_size)

    @property
    def optimizer(self) -> OptimizerOptions:
        """The optimizer with its options. [CLS] and positions do not decay, as in the official MAE code."""
        optim = self.config.optim
        return replace(
            super().optimizer,
            # LARS judges a group by the shape of its first parameter: [CLS] and positions cannot join the 1-D ones.
            exempt=() if optim.name == "lars" else EMBEDDINGS,
            layer_decay=optim.layer_decay if self.config.mode.trains == "all" else None,
        )

    @cached_property
    def costs(self) -> Estimate:
        """Estimates the cost of a step; raises InputError if the network does not take such images."""
        try:
            return super().costs
        except (RuntimeError, AssertionError, ValueError) as error:
            # An error of ours: our encoders take what their config allows.
            if self.info is not None:
                raise
            size = " x ".join(map(str, self.meta_step.image_shape))
            raise InputError(
                f'model.name="{self.config.model.name}" does not accept images of {size}: {error}'
            ) from None

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Values outside the config that must not change when the run resumes: data and weights."""
        digest = self.pretrained.digest if self.pretrained else None
        return {**self.data.identity, "finetune.start_digest": digest}

    @property
    def identity(self) -> Identity:
        """What must not change when the run resumes, and the labels that its weights will have seen."""
        return super().identity.with_history(**{LABELS_SEEN: self.labels_seen.model_dump()})

    @property
    def _labels_before(self) -> SeenLabels | None:
        """The labels that the pretrained weights have seen."""
        return self.pretrained.labels if self.pretrained else None

    @property
    def labels_seen(self) -> SeenLabels:
        """The labels that the final weights have seen, also through pretrained weights."""
        trained_on = SeenLabels(
            fingerprint=self.data.index.fingerprint,
            per_class=self.config.data.labels_per_class,
            holdout=self.config.finetune.holdout,
            draw=self.config.data.label_draw,
        )
        return trained_on.joined(self._labels_before)

    @property
    def label_overlap(self) -> Overlap | None:
        """The worst overlap of labels that the weights have seen with the validation images; None if they saw none."""
        section, before = self.config.data, self._labels_before
        holdout = self.config.finetune.holdout if len(self.data.held_out) else 0.0
        if before is None:
            return None
        fingerprint = self.data.index.fingerprint
        return before.overlap(fingerprint, section.labels_per_class, holdout, draw=section.label_draw)

    def warn_of_seen_labels(self) -> None:
        """Warns if the pretrained weights have seen the labels of the validation images."""
        if self.label_overlap == "held-out":
            print(
                f"warning: {self.config.finetune.start} was trained on the labels of the validation images, so its "
                "results are too good; pretrain with data.leave_out_per_class, or use finetune.holdout=0",
                file=sys.stderr,
            )
