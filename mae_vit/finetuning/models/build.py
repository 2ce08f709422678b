"""Builds the model to fine-tune and loads pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mae_vit.config.encoders import NetworkSection
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import TRAINS_ENCODER, FinetuneConfig, FinetuneSection
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.classifiers import Classifier, NetworkClassifier, ViTClassifier
from mae_vit.finetuning.models.distillation import Distillation, DistilledViTClassifier
from mae_vit.finetuning.models.teacher import Teacher, read_teacher
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.load_report import LoadReport
from mae_vit.models.sizes import PatchInit
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.training.optim.optimizers import OptimizerOptions
from mae_vit.training.optim.param_groups import EMBEDDINGS
from mae_vit.weights.load import load_weights
from mae_vit.weights.names import is_frozen
from mae_vit.weights.start import Weights

_FINAL_NORM = ("norm.weight", "norm.bias")


def describe_encoder(config: FinetuneConfig, data: FinetuneData) -> EncoderInfo | None:
    """Describes the encoder; None for a network that is trained with its own head, or frozen and timm's.

    Raises:
        InputError: if the options do not fit each other.
    """
    trained, frozen = config.finetune.mode in TRAINS_ENCODER, is_frozen(config.finetune.start)
    if isinstance(config.model, NetworkSection) and (trained or frozen):
        return None
    try:
        geometry = config.model.geometry()
    except ValueError as error:
        raise InputError(f"model.{error}") from None
    return EncoderInfo(
        geometry, data.mean, data.std, "finetune", bands=data.bands, preprocessing=data.preprocessing
    )


def teacher_from_config(config: FinetuneConfig, data: FinetuneData, device: torch.device) -> Teacher | None:
    """Reads the teacher onto the device; None without `finetune.teacher`, and in the frozen modes.

    Raises:
        InputError: if it cannot be read, or does not fit the student.
    """
    path = config.finetune.teacher
    if path is None or config.finetune.mode != "finetune":
        return None
    model = config.model
    teacher = read_teacher(Path(path), classes=data.classes, in_chans=model.channels, img_size=model.image_hw)
    teacher.model.to(device)
    return teacher


def _distillation(section: FinetuneSection, teacher: Teacher) -> Distillation:
    assert section.distillation is not None
    assert section.distillation_weight is not None
    return Distillation(
        teacher,
        section.distillation,
        weight=section.distillation_weight,
        temperature=section.distillation_temperature or 1.0,
    )


def build_classifier(
    config: FinetuneConfig, data: FinetuneData, info: EncoderInfo | None, teacher: Teacher | None = None
) -> Classifier:
    """Builds the network with fresh weights drawn from the run's seed.

    Raises:
        InputError: if it cannot be built with these options.
    """
    torch.manual_seed(config.run.seed)
    model, finetune, classes = config.model, config.finetune, len(data.classes)
    labels = LabelLoss(
        classes, label_smoothing=finetune.label_smoothing, mixup=finetune.mixup, cutmix=finetune.cutmix
    )
    common: dict[str, Any] = {"mean": data.mean, "std": data.std, "labels": labels, "bands": data.bands}
    if info is not None:
        encoder = info.geometry.build(**model.drops)
        if finetune.freeze_patch_embed:
            encoder.patch_embed.requires_grad_(False)
        if teacher is None:
            return ViTClassifier(encoder, pool=finetune.pool, head_init=finetune.head_init, **common)
        assert isinstance(encoder, ViTEncoder), "the config has refused others"
        return DistilledViTClassifier(
            encoder, head_init=finetune.head_init, distillation=_distillation(finetune, teacher), **common
        )
    try:
        network = build_network(
            model.name,
            num_classes=classes,
            in_chans=model.channels,
            img_size=model.image_hw,
            **model.drops,
        )
    except ValueError as error:
        raise InputError(f"model.name: {error}") from None
    return NetworkClassifier(network, **common)


def draws_noise(model: nn.Module) -> bool:
    """Returns whether layers draw random numbers: dropout or stochastic depth."""
    return any(
        max(getattr(module, "p", 0.0) or 0.0, getattr(module, "drop_prob", 0.0) or 0.0) > 0
        for module in model.modules()
        if "drop" in type(module).__name__.lower()
    )


def load_weights_into(model: Classifier, start: Weights, patch_init: PatchInit | None = None) -> LoadReport:
    """Loads pretrained weights into a fresh classifier's encoder.

    Returns:
        How each tensor was loaded. The norm after the mean and the head are new by design.

    Raises:
        InputError: if the weights do not fit; names the difference.
    """
    if isinstance(model, NetworkClassifier):
        return _load_network(model, start)
    assert isinstance(model, ViTClassifier)
    coverage = load_weights(start, model.encoder, patch_init=patch_init)
    if model.pool == "mean":
        dropped = [name for name in _FINAL_NORM if name in coverage.skipped]
        coverage.skipped = [name for name in coverage.skipped if name not in dropped]
        if dropped:
            note = "final norm, dropped: the mean of the patch tokens has a new norm after it (MAE)"
            coverage.by_design[" + ".join(dropped)] = note
        coverage.by_design["fc_norm"] = "new: the norm after the mean"
    coverage.by_design["head"] = "new: for these classes"
    if isinstance(model, DistilledViTClassifier):
        coverage.by_design["dist_token + head_dist"] = "new: for the teacher"
    return coverage


def _load_network(model: NetworkClassifier, start: Weights) -> LoadReport:
    """Loads a pretrained network, all of it but the head, into a classifier of the same network."""
    assert start.geometry is not None, "`WeightsOverrides` has refused it"
    encoder = start.geometry.build()
    coverage = load_weights(start, encoder)
    model.network.load_state_dict({**model.network.state_dict(), **encoder.weights()})
    coverage.by_design["head"] = "new: for these classes"
    return coverage


def classifier_optimizer_options(config: FinetuneConfig) -> OptimizerOptions:
    """Returns the optimizer and its options. [CLS] and positions do not decay, as in the official MAE code."""
    optim = config.optim
    return OptimizerOptions(
        optim.name,
        **optim.options_of("name"),
        # LARS adapts a group by the shape of its first parameter, so [CLS] and positions cannot be apart.
        exempt=() if optim.name == "lars" else EMBEDDINGS,
        layer_decay=optim.layer_decay,
    )
