"""Resolves a checked config before a run begins: data, network, steps, costs, identity."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mae_vit.config.command_line import Arguments
from mae_vit.config.plan import Plan, check_grouping, check_same_batch, make_plan
from mae_vit.core.bands import RGB8
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.finetuning.config.modes import Mode
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData, fit_to_data, open_data
from mae_vit.finetuning.models.build import (
    Trainable,
    build_classifier,
    build_segmenter,
    classifier_optimizer_options,
    describe_encoder,
)
from mae_vit.finetuning.results import MaskResults, Predictor, Results
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.encoders.base import LoadReport
from mae_vit.objectives.config import PAIRS
from mae_vit.runtime.ranks import Ranks
from mae_vit.training import startup
from mae_vit.training.checkpoints.checkpoint import LABELS_SEEN
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.cost import Estimate, estimate
from mae_vit.training.engines.precision import Precision
from mae_vit.training.engines.state import BestWeights, weights_of
from mae_vit.training.engines.step_time import StepTime, time_steps
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.identity import Identity
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.weights.foreign import ForeignWeights
from mae_vit.weights.load import warn_normalization_differs
from mae_vit.weights.read import Weights
from mae_vit.weights.seen_labels import Overlap, SeenLabels

if TYPE_CHECKING:
    from mae_vit.finetuning.config.pretrained import Pretrained

# Largest batch of frozen encoders, unless the config sets one.
_MOST_ENCODED = 256


@dataclass(frozen=True)
class Setup(startup.Setup):
    """A config, resolved for these ranks and data: the fine-tuning part of a run.

    Attributes:
        pretrained: its pretrained weights; None for scratch.
        info: geometry and normalization of the encoder; None for a network with a head of its own.
    """

    config: FinetuneConfig
    data: FinetuneData
    pretrained: Pretrained | None
    info: EncoderInfo | None

    @property
    def mode(self) -> Mode:
        """The mode that `finetune.mode` names."""
        return self.config.mode

    @property
    def source(self) -> str:
        """Name of the initial weights."""
        return self.config.finetune.start or ("scratch" if self.mode.augment else "random weights")

    @property
    def weights_file(self) -> str:
        """File of our pretrained weights, for the report of loading them: `source` may be a run folder."""
        return self.pretrained.source if isinstance(self.pretrained, Weights) else self.source

    def build(self) -> Trainable:
        """Builds network and loss, with fresh weights from the run's seed; a third-party encoder keeps its own."""
        if self.mode.labels == "mask":
            foreign = self.pretrained if isinstance(self.pretrained, ForeignWeights) else None
            return build_segmenter(self.config, self.data, self.info, foreign)
        return build_classifier(self.config, self.data, self.info)

    def load(self, model: Trainable) -> LoadReport | None:
        """Loads our pretrained weights into a fresh network; None if there are none.

        Raises:
            InputError: if they do not fit; names the difference.
        """
        if not isinstance(self.pretrained, Weights):
            return None
        return model.load(self.pretrained)

    def warn_of_normalization(self) -> None:
        """Warns if images are normalized otherwise than in the training of the weights."""
        if self.pretrained is not None:
            bands = RGB8 if isinstance(self.pretrained, ForeignWeights) else self.data.bands
            warn_normalization_differs(self.pretrained, self.data.mean, self.data.std, bands)

    @property
    def batch_size(self) -> int:
        """Number of images per micro-batch, or per batch of a frozen encoder."""
        if self.plan is not None and self.mode.augment:
            return self.plan.batch_size_per_device
        train = self.config.train
        return train.batch_size_per_device or min(_MOST_ENCODED, train.effective_batch_size)

    @cached_property
    def costs(self) -> Estimate:
        """Estimates the cost of a step.

        Raises:
            InputError: if the network does not take such images.
        """
        config = self.config
        shape = (config.model.channels, *config.model.image_hw)
        try:
            return estimate(
                self.build,
                image_shape=shape,
                dtype=self.data.bands.torch_dtype,
                batch_size_per_device=self.batch_size,
                activation_checkpointing=config.train.activation_checkpointing,
                optimizer_slots=len(classifier_optimizer_options(config).optimizer_states),
                averaged=config.train.ema_decay is not None,
            )
        except (RuntimeError, AssertionError, ValueError) as error:
            # An error of ours: our encoders take what their config allows.
            if self.info is not None:
                raise
            size = " x ".join(map(str, shape))
            raise InputError(
                f'model.name="{config.model.name}" does not accept images of {size}: {error}'
            ) from None

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Values outside the config that must not change when the run resumes: data and weights."""
        digest = self.pretrained.digest if self.pretrained else None
        derived = {**self.data.identity, "finetune.start_digest": digest}
        if self.plan is not None and self.mode.augment and len(self.data.held_out):
            # When held-out images are measured decides which weights can be chosen.
            derived["finetune.evaluate_every_steps"] = self.plan.evaluate_every_steps
        return derived

    @property
    def identity(self) -> Identity:
        """What must not change when the run resumes, and the labels that its weights will have seen."""
        return super().identity.with_history(**{LABELS_SEEN: self.labels_seen.model_dump()})

    @property
    def _labels_before(self) -> SeenLabels | None:
        """The labels that the pretrained weights have seen."""
        return self.pretrained.labels if isinstance(self.pretrained, Weights) else None

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
        """The worst overlap of labels that the weights have seen with the held-out ones; None if they saw none."""
        section, before = self.config.data, self._labels_before
        holdout = self.config.finetune.holdout if len(self.data.held_out) else 0.0
        if before is None:
            return None
        fingerprint = self.data.index.fingerprint
        return before.overlap(fingerprint, section.labels_per_class, holdout, draw=section.label_draw)

    def warn_of_seen_labels(self) -> None:
        """Warns if the pretrained weights have seen the labels of the held-out images."""
        if self.label_overlap == "held-out":
            print(
                f"warning: {self.config.finetune.start} was trained on the labels of the held-out images, so its "
                "results are too good; pretrain with data.leave_out_per_class, or use finetune.holdout=0",
                file=sys.stderr,
            )

    def time_steps(self, precision: Precision) -> StepTime | None:
        """Times some steps of a mode that trains; None if the network is too large to try."""
        assert self.plan is not None
        pairs = self.config.finetune.mixup or self.config.finetune.cutmix
        return time_steps(
            *(self.config, self.plan, self.build, self.data, self.device, precision),
            unit=PAIRS.unit if pairs else self.config.data.repeats,
            optimizer=classifier_optimizer_options(self.config),
        )

    def held_out(self) -> HeldOut | None:
        """Returns the images that choose the epoch."""
        pictures = self.config.monitor.picture_images
        return self.data.held_out_batches(self.ranks, pictures=pictures, batch_size=self.batch_size)

    def probe(self) -> OnlineProbe | None:
        """Returns None: the held-out accuracy replaces a probe."""
        return None

    def finish(
        self, engine: Engine, folder: RunFolder, step: int, best: BestWeights | None
    ) -> tuple[dict[str, Any], Callable[[], None], list[str]]:
        """Tests the chosen weights, or the last ones if none were chosen; collective."""
        if best is None:
            with engine.full_weights():
                best = BestWeights(step, float("nan"), weights_of(engine.objective))
        predictor = Predictor(self.ranks, engine.device, engine.module.context, self.batch_size)
        kind = MaskResults if self.mode.labels == "mask" else Results
        outcome = kind(self.config, self.data, folder, predictor, self.info, self.labels_seen)
        # A network of its own: ZeRO 3 keeps the trained one in parts.
        measured, write = outcome.measure(self.build(), best)
        summary = {"labels_seen_by_start": self.label_overlap, **measured}
        return summary, write, outcome.lines(summary)


def set_up(
    arguments: Arguments, config: FinetuneConfig, pretrained: Pretrained | None, ranks: Ranks
) -> Setup:
    """Opens the data and resolves everything.

    Raises:
        InputError: for options that do not fit each other, the weights or the data.
    """
    if not config.mode.augment and (arguments.extend or isinstance(arguments.resume, Path)):
        raise InputError(
            f'--extend and --resume PATH have no effect with finetune.mode="{config.finetune.mode}", which does not '
            "train; leave them out"
        )
    say, device = ranks.rank == 0, startup.choose_device(config, ranks)
    config = fit_to_data(config, pretrained if isinstance(pretrained, Weights) else None, say=say)
    foreign = pretrained if isinstance(pretrained, ForeignWeights) else None
    data = open_data(
        config,
        ranks,
        device,
        interpolation=foreign.images.interpolation if foreign else "bicubic",
        dry_run=arguments.dry_run,
    )
    info = describe_encoder(config, data)
    if config.finetune.mode == "few_shot":
        config = _fit_shots(config, data, say=say)
    plan = _plan_steps(config, data, ranks, same_batch=arguments.same_batch)
    return Setup(config, ranks, device, data, plan, pretrained, info)


def _plan_steps(config: FinetuneConfig, data: FinetuneData, ranks: Ranks, *, same_batch: bool) -> Plan | None:
    """Derives the numbers of the training steps; a linear probe's are for rate factor 1."""
    mode, finetune = config.mode, config.finetune
    if mode.trains == "nothing":
        return None
    # Every rank trains the whole layer on frozen features.
    sizes = {"num_samples": len(data.train), "world_size": ranks.world_size if mode.augment else 1}
    if same_batch:
        check_same_batch(config, **sizes)
    plan = make_plan(config, **sizes)
    if finetune.mixup or finetune.cutmix:
        check_grouping(plan, ranks.world_size, config.data.repeats, **PAIRS._asdict())
    if not mode.augment:
        lowest = min(finetune.lr_factors) * plan.lr
        if config.optim.min_lr > lowest:
            raise InputError(
                f"optim.min_lr={config.optim.min_lr:g} is above the lowest peak rate {lowest:g} of "
                "finetune.lr_factors; lower it"
            )
        if plan.effective_batch_size < 2:
            raise InputError("only one image to train on; the norm of a linear probe needs 2 or more")
    return plan


def _fit_shots(config: FinetuneConfig, data: FinetuneData, *, say: bool) -> FinetuneConfig:
    """Drops default shots for which a class has too few labels. If the config sets such shots, raises InputError."""
    counts = np.bincount(np.asarray(data.index.labels)[data.train], minlength=len(data.classes))
    fewest = int(counts[counts > 0].min())
    if max(config.finetune.shots) <= fewest:
        return config
    name = data.classes[int(np.flatnonzero(counts == fewest)[0])]
    fitting = [shots for shots in config.finetune.shots if shots <= fewest] or [fewest]
    has = f'class "{name}" has only {count_of(fewest, "labeled image")}'
    if "shots" in config.finetune.model_fields_set:
        raise InputError(f"finetune.shots={config.finetune.shots}: {has}; use finetune.shots={fitting}")
    if say:
        print(f"note: {has}; using finetune.shots={fitting} instead of the default {config.finetune.shots}")
    return config.model_copy(update={"finetune": config.finetune.model_copy(update={"shots": fitting})})
