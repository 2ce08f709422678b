"""Builds the network of a run and loads pretrained weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.classifiers import LARS_STD, Classifier, NetworkClassifier, ViTClassifier
from mae_vit.finetuning.models.segmenter import Segmenter
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.encoders.network import NetworkEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.read import Weights

Trainable = Classifier | Segmenter


def describe_encoder(
    config: FinetuneConfig, data: FinetuneData, weights: Weights | None
) -> EncoderInfo | None:
    """Describes the encoder; None for a network that trains with its own head, or pools as timm says.

    Raises:
        InputError: if the options do not fit each other.
    """
    by_timm = weights is not None and weights.network is not None
    if config.model.family == "network" and (config.mode.trains == "all" or by_timm):
        return None
    try:
        geometry = config.model.geometry()
    except ValueError as error:
        raise InputError(f"model.{error}") from None
    return EncoderInfo(
        geometry, data.mean, data.std, "finetune", bands=data.bands, preprocessing=data.preprocessing
    )


def build_classifier(config: FinetuneConfig, data: FinetuneData, info: EncoderInfo | None) -> Classifier:
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
        return ViTClassifier(encoder, pool=finetune.pool, head_init=finetune.head_init, **common)
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


def build_segmenter(config: FinetuneConfig, data: FinetuneData, info: EncoderInfo | None) -> Segmenter:
    """Builds the network with fresh weights drawn from the run's seed.

    Raises:
        InputError: if it cannot be built with these options.
    """
    torch.manual_seed(config.run.seed)
    model = config.model
    encoder: Encoder
    if info is not None:
        encoder = info.geometry.build(**model.drops)
    else:
        try:
            # Nothing is masked: any patch size works.
            encoder = NetworkEncoder(
                model.name, img_size=model.image_hw, patch_size=1, in_chans=model.channels, **model.drops
            )
        except ValueError as error:
            raise InputError(f"model.name: {error}") from None
    segmenter = Segmenter(
        encoder,
        probe=config.mode.trains == "head",
        num_classes=len(data.classes),
        label_smoothing=config.finetune.label_smoothing,
        mean=data.mean,
        std=data.std,
        bands=data.bands,
    )
    if segmenter.probe and config.optim.name == "lars":
        nn.init.trunc_normal_(segmenter.decode_head.get_parameter("classifier.weight"), std=LARS_STD)
    return segmenter
