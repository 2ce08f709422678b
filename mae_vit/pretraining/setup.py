"""Builds and checks the parts of a pretraining run from its config, before the ranks join."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch

from mae_vit.config.plan import Plan, check_grouping, make_plan
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of
from mae_vit.data.data_path import describe_data, with_channels
from mae_vit.models.attention import is_fused
from mae_vit.models.encoder_file import EncoderInfo, encoder_bytes
from mae_vit.models.sizes import Pool
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import Data, open_data
from mae_vit.pretraining.report.verdict import FEW_STEPS
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import COST_BEFORE, LABELS_SEEN
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.compiling import choose_compiling
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.identity import Identity
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.setup import TrainingSetup
from mae_vit.training.startup import choose_device
from mae_vit.weights.seen_labels import SeenLabels

if TYPE_CHECKING:
    from mae_vit.weights.read import Weights


@dataclass(frozen=True)
class Setup(TrainingSetup):
    """A config, resolved for these ranks: the pretraining part of a run."""

    config: PretrainConfig
    data: Data
    info: EncoderInfo
    source: str = "scratch"

    @property
    def identity(self) -> Identity:
        """What must not change when the run resumes, and the history of its weights."""
        before = {COST_BEFORE: self.info.before} if self.info.before else {}
        return super().identity.with_history(**{LABELS_SEEN: self.info.labels}, **before)

    @property
    def unit(self) -> int:
        """Number of consecutive rows that belong together."""
        grouping = self.config.objective.grouping
        return grouping.unit if grouping else super().unit

    @property
    def advice(self) -> str:
        """What to do for held-out images."""
        why = self.data.why_none
        return f"{why}, so no held-out metrics and no pictures; prepare data with --holdout 0.05 for them"

    def build(self) -> Objective:
        """Builds encoder and objective, initialized from the run's seed."""
        return build_objective(self.config, self.info, num_classes=self.data.num_classes)

    def held_out(self) -> HeldOut | None:
        """Loads the fixed held-out images."""
        images = self.config.monitor.evaluate_images
        return self.data.held_out(self.ranks, images=images, batch_size=self.batch_size)

    def probe(self) -> OnlineProbe | None:
        """Loads the online probe."""
        return self.data.probe(self.ranks, batch_size=self.batch_size)

    def finish(
        self, engine: Engine, folder: RunFolder, step: int, best: BestWeights | None
    ) -> tuple[dict[str, Any], Callable[[], None], list[str]]:
        """Returns the numbers of the probe's images, and a function that writes `encoder.safetensors`; collective."""
        content = b""
        with engine.full_weights():
            if self.ranks.rank == 0:
                images = step * self.plan.effective_batch_size
                flops = images * self.costs.flops_per_image
                objective = engine.objective
                assert isinstance(objective, Objective)
                info = replace(self.info, step=step, images_seen=images, flops=flops)
                content = encoder_bytes(objective.encoder, info)
        results = {}
        probe, index = self.data.probe_split, self.data.held_out_index
        if index is not None and not probe.why_none:
            sizes = {"images": len(probe.queries), "fitted_on": len(probe.support)}
            results = {"probed": {**sizes, "classes": len(index.dataset.classes)}}
        write = partial(write_atomically, folder.encoder, content)
        lines = [f"  encoder   {folder.encoder}", f"  next      mae-vit report {quote(str(folder.path))}"]
        return results, write, lines


def set_up(config: PretrainConfig, ranks: Ranks) -> Setup:
    """Opens the data and resolves everything.

    Raises:
        InputError: for options that conflict with each other or with the data.
    """
    device = choose_device(config, ranks)
    config = with_channels(config, describe_data(config))
    data = open_data(config, ranks, device)
    if config.objective.uses_labels:
        data.check_labels()
    plan = make_plan(
        config, num_samples=data.num_samples, world_size=ranks.world_size, probe_size=len(data.probe_split)
    )
    if grouping := config.objective.grouping:
        check_grouping(plan, ranks.world_size, config.data.repeats, **grouping._asdict())
    plan = replace(plan, notes=(*plan.notes, *_doubts(plan, config, data, ranks)))
    info = describe_encoder(config, data)
    setup = Setup(config, ranks, device, data, plan, info, config.model.init or "scratch")
    with torch.device("meta"):
        setup.build()  # raises if the objective does not suit the model
    return setup


def _doubts(plan: Plan, config: PretrainConfig, data: Data, ranks: Ranks) -> Iterator[str]:
    """Says whether held-out images are few, images are enlarged, and steps are few."""
    least = getattr(config.objective, "group_size", 0) * ranks.world_size
    images = min(config.monitor.evaluate_images, len(data.held_out_index or ()))
    if config.objective.grouping and 0 < images < least:
        yield (
            f"{images} held-out images are less than a group (objective.group_size) for each rank, so not all are "
            f"contrasted, or none; it takes {least}, with monitor.evaluate_images={least}"
        )
    (height, width), info = config.model.image_hw, data.index.split_info
    if info.height[1] < height and info.width[1] < width:
        yield f"the images are enlarged to {height} x {width} px: the largest has {info.height[1]} x {info.width[1]}"
    if plan.total_steps < FEW_STEPS:
        yield (
            f"{count_of(plan.total_steps, 'step')} may be too few; give more train.steps or train.epochs. On "
            "handwritten digits MAE gained nothing in 200 steps and most in 600, on photographs of 64 px more in "
            "6,000 than in 2,000"
        )


def least_kept(setup: Setup) -> int:
    """Returns the least bytes that a step keeps for its backward pass; 0 (unknown) if it is compiled."""
    config, precision = setup.config, setup.config.train.precision
    assert precision != "auto", "`settle_precision` comes first"
    if choose_compiling(config, setup.plan, setup.device, setup.costs).on:
        return 0
    fused_attention = is_fused(setup.device, config.train.attention)
    return setup.meta_step.kept_bytes(precision, fused_attention=fused_attention)


def describe_encoder(config: PretrainConfig, data: Data) -> EncoderInfo:
    """Describes the untrained encoder."""
    pool: Pool = getattr(config.objective, "pool", "mean")
    return EncoderInfo(
        config.model.geometry(),
        data.mean,
        data.std,
        config.objective.name,
        labels=seen_labels(config, data, None),
        bands=data.bands,
        preprocessing=data.preprocessing,
        pool=pool,
    )


def seen_labels(config: PretrainConfig, data: Data, before: SeenLabels | None) -> dict[str, Any] | None:
    """Returns the labels that the run's weights will have seen; `before`: those seen by its initial weights."""
    seen = before
    if config.objective.uses_labels:
        trained_on = SeenLabels(
            fingerprint=data.index.fingerprint,
            left_out=config.data.leave_out_per_class or 0,
            draw=config.data.label_draw,
            draws=config.data.leave_out_draws,
        )
        seen = trained_on.joined(before)
    return seen.model_dump() if seen else None


def build_objective(config: PretrainConfig, info: EncoderInfo, *, num_classes: int) -> Objective:
    """Builds encoder and objective, initialized from the run's seed.

    Raises:
        InputError: if the objective does not suit the model.
    """
    geometry = info.geometry
    try:
        config.objective.check(geometry, num_classes)
    except ValueError as error:
        raise InputError(f"objective.{error}") from None
    torch.manual_seed(config.run.seed)
    try:
        encoder = geometry.build(**config.model.drops)
    except ValueError as error:
        raise InputError(f"model.name: {error}") from None
    return config.objective.build(
        encoder, mean=info.mean, std=info.std, num_classes=num_classes, bands=info.bands
    )


def initialize(
    objective: Objective, config: PretrainConfig, info: EncoderInfo, *, say: bool
) -> Weights | None:
    """Loads `model.init`, if set, into a new objective and returns the weights.

    Raises:
        InputError: if the weights cannot be read or do not match the model.
    """
    if config.model.init is None:
        return None
    # Slow imports that few runs need.
    from mae_vit.weights.load import load_weights, warn_normalization_differs
    from mae_vit.weights.read import read_weights

    weights = read_weights(config.model.init).fitted(info.img_size, info.in_chans)
    coverage = load_weights(weights, objective.encoder, objective, objective=config.objective.name)
    if say:
        print(coverage.describe(weights.source))
        warn_normalization_differs(weights, info.mean, info.std, info.bands)
    return weights
