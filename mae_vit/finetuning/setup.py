"""What follows from a checked config before a fine-tuning run begins: its parts, its cost, its identity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mae_vit.config.encoders import NetworkSection
from mae_vit.config.plan import Plan
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.read import Starts
from mae_vit.finetuning.config.schema import SEGMENTATION, FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.build import build_classifier, classifier_optimizer_options, load_weights_into
from mae_vit.finetuning.models.teacher import Teacher
from mae_vit.finetuning.results.write import Outputs
from mae_vit.finetuning.segmentation.build import build_segmenter, load_weights_into_segmenter
from mae_vit.finetuning.segmentation.results import SegmentationOutputs
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.load_report import LoadReport
from mae_vit.objectives.objective import Task
from mae_vit.training.checkpoints.format import LABELS_SEEN
from mae_vit.training.checkpoints.resume import Identity, run_identity
from mae_vit.training.engines.cost import Estimate, estimate
from mae_vit.weights.seen_labels import SeenLabels
from mae_vit.weights.start import Weights


class Parts(NamedTuple):
    """The functions that differ between classification and segmentation.

    Attributes:
        build: builds the network.
        load: loads pretrained weights into it.
        make_outputs: makes what measures the network and writes the results.
        metric: of the held-out images; it chooses the epoch.
    """

    build: Callable[[], Any]
    load: Callable[[Any, Weights], LoadReport]
    make_outputs: Callable[..., Any]
    metric: str


def choose_parts(
    config: FinetuneConfig,
    data: FinetuneData,
    info: EncoderInfo | None,
    teacher: Teacher | None,
    starts: Starts,
) -> Parts:
    """Returns the parts of `finetune.mode`."""
    patch_init = getattr(config.model, "patch_init", None)
    if config.finetune.mode in SEGMENTATION:
        build = partial(build_segmenter, config, data, info, starts.foreign)
        load = partial(load_weights_into_segmenter, patch_init=patch_init)
        return Parts(build, load, SegmentationOutputs, "miou")
    classifier = partial(build_classifier, config, data, info, teacher)
    return Parts(classifier, partial(load_weights_into, patch_init=patch_init), Outputs, "top1")


def estimate_costs(
    config: FinetuneConfig, plan: Plan, build: Callable[[], Task], data: FinetuneData
) -> Estimate:
    """Estimates the cost of the run.

    Raises:
        InputError: if the network does not take such images.
    """
    shape = (config.model.channels, *config.model.image_hw)
    try:
        return estimate(
            build,
            image_shape=shape,
            dtype=data.bands.torch_dtype,
            batch_size_per_device=plan.batch_size_per_device,
            activation_checkpointing=config.train.activation_checkpointing,
            optimizer_slots=len(classifier_optimizer_options(config).optimizer_states),
            averaged=config.train.ema_decay is not None,
        )
    except (RuntimeError, AssertionError, ValueError) as error:
        # Our own encoders take what their config allows.
        if not isinstance(config.model, NetworkSection):
            raise
        size = " x ".join(map(str, shape))
        raise InputError(f'model.name="{config.model.name}" does not take {size} images: {error}') from None


def identify(
    config: FinetuneConfig,
    plan: Plan,
    data: FinetuneData,
    starts: Starts,
    teacher: Teacher | None,
    labels_seen: SeenLabels,
) -> Identity:
    """Returns what must not change when the run resumes: options, data, pretrained weights and teacher."""
    derived = {**data.identity, "finetune.start_digest": starts.digest}
    derived |= {"finetune.teacher_digest": teacher.digest} if teacher else {}
    if len(data.held_out):
        # When held-out images are measured decides which weights can be chosen.
        derived["finetune.evaluate_every_steps"] = plan.evaluate_every_steps
    return run_identity(config, derived=derived).with_history(**{LABELS_SEEN: labels_seen.model_dump()})
