"""The classifier whose frozen features are scored, with pretrained weights in its encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mae_vit.config.schema import ModelSection
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.label_overlap import start_label_overlap, warn_of_seen_labels
from mae_vit.finetuning.models.classifiers import Classifier, ViTClassifier
from mae_vit.models.vit import PatchInit
from mae_vit.weights.load import LoadReport, load_weights, warn_normalization_differs
from mae_vit.weights.seen_labels import Overlap
from mae_vit.weights.start import Weights


def open_frozen(
    config: FinetuneConfig,
    data: FinetuneData,
    build: Callable[[], Classifier],
    start: Weights | None,
    *,
    say: bool,
) -> tuple[ViTClassifier, Overlap | None]:
    """Builds the classifier around the pretrained encoder.

    Returns:
        The classifier, and how the labels that the weights have seen overlap with those of this run.
    """
    model = build()
    assert isinstance(model, ViTClassifier)
    assert isinstance(config.model, ModelSection)
    loaded = load_frozen(model, start, config.model.patch_init)
    labels_seen = start_label_overlap(start, None, config, data)
    if not say:
        return model, labels_seen
    if loaded is None or start is None:
        print("note: no pretrained weights (--ckpt): these are the features of random weights")
        return model, labels_seen
    print(loaded.describe(start.source))
    warn_normalization_differs(start, data.mean, data.std, data.bands)
    if "fc_norm.weight" in start.tensors and model.pool == "cls":
        print(
            "note: these weights were fine-tuned on the mean of the patch tokens; finetune.pool=mean uses it"
        )
    if labels_seen == "held-out":
        warn_of_seen_labels(start.source)
    return model, labels_seen


def load_frozen(
    model: ViTClassifier, start: Weights | None, patch_init: PatchInit | None = None
) -> LoadReport | None:
    """Loads pretrained weights into the encoder, and applies the norm that they were trained with.

    Usually this is the final norm, after the last block, for both kinds of pooling. Weights that were
    fine-tuned on the mean of the patch tokens have `fc_norm` after the mean instead (official MAE code).

    Returns:
        How each tensor was loaded; None without pretrained weights.

    Raises:
        InputError: if the weights do not fit; names the difference.
    """
    norm = torch.nn.LayerNorm(model.encoder.embed_dim, eps=1e-6)
    model.encoder.norm, model.fc_norm = norm, torch.nn.Identity()
    if start is None:
        return None
    norm_names = [name for name in ("fc_norm.weight", "fc_norm.bias") if name in start.tensors]
    if norm_names:
        model.encoder.norm, model.fc_norm = model.fc_norm, norm
    report = load_weights(start, model.encoder, patch_init=patch_init)
    if norm_names:
        if len(norm_names) == 1:
            raise InputError(f"{start.source} has only {norm_names[0]} of the norm after the mean")
        norm.load_state_dict({name.removeprefix("fc_norm."): start.tensors[name] for name in norm_names})
        report.skipped = [name for name in report.skipped if name not in norm_names]
        report.loaded += norm_names
    return report
