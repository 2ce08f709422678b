"""Builds what is fine-tuned, and puts a start into it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from finetune.classifiers import Classifier, NetworkClassifier, ViTClassifier
from finetune.config import FinetuneConfig, FinetuneSection
from finetune.data import FinetuneData
from finetune.distill import Distillation, DistilledViTClassifier
from finetune.teacher import Teacher, read_teacher
from mae_vit.baselines import build_network
from mae_vit.config import ModelSection
from mae_vit.coverage import Coverage, load_start
from mae_vit.errors import InputError
from mae_vit.geometry import resolve_encoder
from mae_vit.objectives.labels import LabelLoss
from mae_vit.seen_labels import Overlap, SeenLabels, most_flattering
from mae_vit.starts import Start
from mae_vit.training.optimizers import OptimizerOptions
from mae_vit.training.param_groups import EMBEDDINGS
from mae_vit.weights import EncoderInfo

_FINAL_NORM = ("norm.weight", "norm.bias")


def describe_encoder(config: FinetuneConfig, data: FinetuneData) -> EncoderInfo | None:
    """Resolves the geometry of the encoder; None for a network of another kind.

    Raises:
        InputError: if width and heads do not fit.
    """
    if not isinstance(config.model, ModelSection):
        return None
    return resolve_encoder(config.model, mean=data.mean, std=data.std, objective="finetune")


def find_teacher(config: FinetuneConfig, data: FinetuneData) -> Teacher | None:
    """Reads the teacher, where there is one.

    Raises:
        InputError: if it cannot be read, or does not fit.
    """
    path = config.finetune.teacher
    if path is None or config.finetune.mode != "finetune":
        return None
    model = config.model
    return read_teacher(Path(path), classes=data.classes, in_chans=model.in_chans, img_size=model.image_hw)


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
    """Builds the network with fresh weights, from the run's seed.

    Raises:
        InputError: if it cannot be built.
    """
    torch.manual_seed(config.run.seed)
    model, finetune, classes = config.model, config.finetune, len(data.classes)
    labels = LabelLoss(
        classes, label_smoothing=finetune.label_smoothing, mixup=finetune.mixup, cutmix=finetune.cutmix
    )
    common: dict[str, Any] = {"mean": data.mean, "std": data.std, "labels": labels}
    if isinstance(model, ModelSection):
        assert info is not None
        encoder = info.build(drop_rate=model.drop_rate, drop_path_rate=model.drop_path_rate)
        if finetune.freeze_patch_embed:
            encoder.patch_embed.requires_grad_(False)
        if teacher is None:
            return ViTClassifier(encoder, pool=finetune.pool, head_init=finetune.head_init, **common)
        return DistilledViTClassifier(
            encoder, head_init=finetune.head_init, distillation=_distillation(finetune, teacher), **common
        )
    try:
        network = build_network(
            model.name,
            num_classes=classes,
            in_chans=model.in_chans,
            img_size=model.image_hw,
            drop_path_rate=model.drop_path_rate,
        )
    except ValueError as error:
        raise InputError(f"model.name: {error}") from None
    return NetworkClassifier(network, **common)


def draws_noise(model: Classifier) -> bool:
    """Whether layers draw noise: dropout, stochastic depth, whatever architecture asks for it."""
    return any(
        max(getattr(module, "p", 0.0) or 0.0, getattr(module, "drop_prob", 0.0) or 0.0) > 0
        for module in model.modules()
        if "drop" in type(module).__name__.lower()
    )


def load_into(model: Classifier, start: Start) -> Coverage:
    """Puts a start into a fresh classifier's encoder.

    Returns:
        What became of each tensor; the read-out and head begin anew by design.

    Raises:
        InputError: if it does not fit, naming the difference.
    """
    assert isinstance(model, ViTClassifier)
    coverage = load_start(start, model.encoder)
    if model.pool == "mean":
        dropped = [name for name in _FINAL_NORM if name in coverage.skipped]
        coverage.skipped = [name for name in coverage.skipped if name not in dropped]
        if dropped:
            note = "final norm, dropped: the mean of the patch tokens has a new norm behind it (MAE)"
            coverage.by_design[" + ".join(dropped)] = note
        coverage.by_design["fc_norm"] = "fresh: the norm behind the mean"
    coverage.by_design["head"] = "fresh: these classes"
    if isinstance(model, DistilledViTClassifier):
        coverage.by_design["dist_token + head_dist"] = "fresh: the teacher's"
    return coverage


def optimizer_of(config: FinetuneConfig) -> OptimizerOptions:
    """Which optimizer; as in the official MAE code, [CLS] and positions do not decay."""
    optim = config.optim
    return OptimizerOptions(
        optim.name,
        optim.weight_decay,
        optim.own_options,
        # LARS tells its groups apart by their first parameter's shape alone.
        exempt=() if optim.name == "lars" else EMBEDDINGS,
        layer_decay=optim.layer_decay,
    )


def all_labels(
    config: FinetuneConfig, data: FinetuneData, start: Start | None = None, teacher: Teacher | None = None
) -> SeenLabels:
    """The labels that a run's weights will have seen, by way of its start and its teacher too."""
    own = SeenLabels(
        fingerprint=data.index.fingerprint,
        per_class=config.data.labels_per_class,
        holdout=config.finetune.holdout,
    )
    return own.joined(*_labels_before(start, teacher))


def _labels_before(start: Start | None, teacher: Teacher | None) -> list[SeenLabels | None]:
    return [start.labels if start else None, teacher.told.labels if teacher else None]


def labels_seen(
    start: Start | None, teacher: Teacher | None, config: FinetuneConfig, data: FinetuneData
) -> Overlap | None:
    """Tells of which labels a start, or a teacher, passes something on; of both the one that flatters most."""
    holdout = config.finetune.holdout if len(data.held_out) else 0.0
    found = {
        labels.overlap(data.index.fingerprint, config.data.labels_per_class, holdout)
        for labels in _labels_before(start, teacher)
        if labels is not None
    }
    return most_flattering(found)


def warn_of_seen_labels(source: str) -> None:
    """Says on standard error that weights have seen the labels of images that choose here."""
    print(
        f"warning: {source} was trained on the labels of the images that choose here (the epoch, the rate), "
        "which flatter it: pretrain with data.leave_out_per_class, or give finetune.holdout=0",
        file=sys.stderr,
    )
