"""The encoder whose frozen features are scored, with its pretrained weights, and a fresh layer for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from mae_vit.finetuning.config.read import Starts
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.label_overlap import start_label_overlap, warn_of_seen_labels
from mae_vit.finetuning.models.classifiers import Classifier, ViTClassifier, make_head
from mae_vit.models.load_report import LoadReport
from mae_vit.models.sizes import PatchInit
from mae_vit.weights.encoder import ViTFeatures, load_features
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.foreign import ForeignWeights
from mae_vit.weights.foreign_encoder import open_foreign, open_untrained
from mae_vit.weights.load import warn_normalization_differs
from mae_vit.weights.names import FOREIGN_ORIGIN
from mae_vit.weights.seen_labels import Overlap
from mae_vit.weights.start import Weights


@dataclass(frozen=True)
class Measured:
    """What a mode on frozen features measures.

    Attributes:
        encoder: gives the features.
        head: a fresh layer on them, D -> K, drawn from the run's seed.
        labels_seen: how the labels that the weights have seen overlap with those of this run; None if not, or
            if nobody knows.
    """

    encoder: FeatureEncoder
    head: nn.Linear
    labels_seen: Overlap | None


def open_measured(
    config: FinetuneConfig,
    data: FinetuneData,
    build: Callable[[], Classifier],
    starts: Starts,
    *,
    say: bool,
) -> Measured:
    """Opens the encoder that the start names; without a start, one of random weights.

    Raises:
        InputError: if the weights do not fit; names the difference.
    """
    if starts.foreign is not None:
        return _open_foreign(config, data, starts.foreign, say=say)
    return _open_own(config, data, build, starts.weights, say=say)


def open_untrained_twin(
    config: FinetuneConfig, data: FinetuneData, build: Callable[[], Classifier], starts: Starts
) -> Measured | None:
    """Opens the same network with random weights of the run's seed, to compare with.

    Returns:
        None where the run measures random weights itself.
    """
    if starts.foreign is not None:
        torch.manual_seed(config.run.seed)
        encoder = open_untrained(starts.foreign, _images_of(config, data, starts.foreign))
        head = make_head(encoder.num_features, len(data.classes), config.finetune.head_init)
        return Measured(encoder, head, None)
    return None if starts.weights is None else _open_own(config, data, build, None, say=False)


def _images_of(config: FinetuneConfig, data: FinetuneData, weights: ForeignWeights) -> ImageInput:
    return replace(
        weights.images, img_size=config.model.image_hw, mean=data.mean, std=data.std, bands=data.bands
    )


def _open_foreign(
    config: FinetuneConfig, data: FinetuneData, weights: ForeignWeights, *, say: bool
) -> Measured:
    images = _images_of(config, data, weights)
    encoder = open_foreign(weights, images)
    if say:
        count = sum(value.numel() for value in encoder.parameters())
        height, width = images.img_size
        print(
            f"start    {weights.source}: {weights.name}, {FOREIGN_ORIGIN}; {count:,} parameters, all of the file; "
            f"{height}x{width} px ({images.interpolation}), {encoder.num_features} features"
        )
        warn_normalization_differs(weights, data.mean, data.std)
    torch.manual_seed(config.run.seed)
    head = make_head(encoder.num_features, len(data.classes), config.finetune.head_init)
    return Measured(encoder, head, None)


def _open_own(
    config: FinetuneConfig,
    data: FinetuneData,
    build: Callable[[], Classifier],
    start: Weights | None,
    *,
    say: bool,
) -> Measured:
    """Builds the classifier around the pretrained encoder, and takes it apart."""
    model = build()
    assert isinstance(model, ViTClassifier)
    loaded = load_frozen(model, start, config.model.patch_init)
    labels_seen = start_label_overlap(start, None, config, data)
    images = ImageInput(config.model.image_hw, config.model.channels, data.mean, data.std, bands=data.bands)
    encoder = ViTFeatures(model.encoder, images, pool=model.pool, fc_norm=model.fc_norm)
    measured = Measured(encoder, model.head, labels_seen)
    if not say:
        return measured
    if loaded is None or start is None:
        print("note: no pretrained weights (--ckpt): these are the features of random weights")
        return measured
    print(loaded.describe(start.source))
    warn_normalization_differs(start, data.mean, data.std, data.bands)
    if "fc_norm.weight" in start.tensors and model.pool == "cls":
        print(
            "note: these weights were fine-tuned on the mean of the patch tokens; finetune.pool=mean uses it"
        )
    if labels_seen == "held-out":
        warn_of_seen_labels(start.source)
    return measured


def load_frozen(
    model: ViTClassifier, start: Weights | None, patch_init: PatchInit | None = None
) -> LoadReport | None:
    """Loads pretrained weights into the encoder, and applies the norm that they were trained with.

    Returns:
        How each tensor was loaded; None without pretrained weights.

    Raises:
        InputError: if the weights do not fit, or lack a tensor.
    """
    if start is None:
        model.encoder.norm = nn.LayerNorm(model.encoder.embed_dim, eps=1e-6)
        model.fc_norm = nn.Identity()
        return None
    report, model.fc_norm = load_features(start, model.encoder, patch_init)
    return report
