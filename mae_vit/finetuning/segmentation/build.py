"""Builds the network of a segmentation run and loads pretrained weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mae_vit.config.encoders import NetworkSection
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import SEGMENTATION, FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.segmentation.networks import build_map_network, map_width
from mae_vit.finetuning.segmentation.segmenter import (
    ForeignSegmenter,
    NetworkSegmenter,
    Segmenter,
    ViTSegmenter,
)
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.load_report import LoadReport
from mae_vit.models.sizes import PatchInit
from mae_vit.weights.foreign import ForeignWeights
from mae_vit.weights.foreign_encoder import open_foreign
from mae_vit.weights.load import check_complete, load_weights
from mae_vit.weights.names import FOREIGN_ORIGIN
from mae_vit.weights.start import Weights

# Options of the encoder's training, and of a classifier.
_UNUSED_BY_PROBE = (
    ("optim", "layer_decay", None),
    ("model", "drop_rate", 0.0),
    ("model", "drop_path_rate", 0.0),
    ("finetune", "freeze_patch_embed", False),
)
_UNUSED = (("finetune", "pool", "mean"), ("finetune", "head_init", "zero"))


def build_segmenter(
    config: FinetuneConfig,
    data: FinetuneData,
    info: EncoderInfo | None,
    foreign: ForeignWeights | None = None,
) -> Segmenter:
    """Builds the network with fresh weights drawn from the run's seed; an encoder of others with its own weights.

    Raises:
        InputError: if it cannot be built with these options.
    """
    torch.manual_seed(config.run.seed)
    model, finetune = config.model, config.finetune
    common: dict[str, Any] = {
        "num_classes": len(data.classes),
        "label_smoothing": finetune.label_smoothing,
        "mean": data.mean,
        "std": data.std,
    }
    if foreign is not None:
        images = replace(foreign.images, img_size=model.image_hw, mean=data.mean, std=data.std)
        # Costs are estimated on the meta device, where loading warns of each tensor.
        with torch.device("cpu"):
            return ForeignSegmenter(open_foreign(foreign, images), **common)
    if not isinstance(model, NetworkSection):
        assert info is not None
        encoder = info.geometry.build(**model.drops)
        return ViTSegmenter(
            encoder,
            probe=finetune.mode == "segment_probe",
            freeze_patch_embed=finetune.freeze_patch_embed,
            **common,
        )
    try:
        network = build_map_network(model)
        return NetworkSegmenter(network, width=map_width(network, model), **common)
    except ValueError as error:
        raise InputError(f"model.name: {error}") from None


def load_weights_into_segmenter(
    model: Segmenter, start: Weights, patch_init: PatchInit | None = None
) -> LoadReport:
    """Loads pretrained weights into a fresh segmenter's encoder; returns how each tensor was loaded.

    Raises:
        InputError: if the weights do not fit; names the difference.
    """
    assert isinstance(model, ViTSegmenter)
    # Weights fit learned positions or a fixed table, which a frozen encoder would not tell apart.
    model.freeze(False)
    if "norm.weight" not in start.tensors:
        # A classifier that pools the mean has its norm behind the mean; here it norms each token.
        tensors = {name.removeprefix("fc_"): each for name, each in start.tensors.items()}
        start = replace(start, tensors=tensors)
    coverage = load_weights(start, model.encoder, patch_init=patch_init)
    if model.probe:
        check_complete(start, coverage.random)
    model.freeze(model.probe)
    coverage.by_design["decode_head"] = "fresh: the classes of these masks"
    return coverage


def segmentation_notes(config: FinetuneConfig, foreign: ForeignWeights | None) -> list[str]:
    """Returns notes on whose the weights are, and on options that have no effect in a segmentation mode."""
    whose = f"{foreign.source} is {FOREIGN_ORIGIN}; it stays as it is" if foreign else None
    unused = _unused_options(config) if config.finetune.mode in SEGMENTATION else []
    ignored = f"{', '.join(unused)}: no effect with finetune.mode={config.finetune.mode}" if unused else None
    return [note for note in (whose, ignored) if note]


def _unused_options(config: FinetuneConfig) -> list[str]:
    probe = config.finetune.mode == "segment_probe"
    unused = []
    for section, key, neutral in (*_UNUSED, *(_UNUSED_BY_PROBE if probe else ())):
        value = getattr(getattr(config, section), key, neutral)
        if value != neutral:
            unused.append(f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}")
    return unused
