"""A fine-tuned network that classifies new images.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mae_vit.core.bands import Bands
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.core.user_files import expand_path
from mae_vit.finetuning.models.classifier_file import ClassifierFile, read_classifier
from mae_vit.models.attention import choose_attention
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput


class ImageClassifier(FeatureEncoder):
    """A classifier with its image transform; its features are logits. `load_classifier` loads it.

    Attributes:
        classes: names of the K classes, in the order of the logits.
        trained_on: fingerprints of the prepared splits whose labels it has seen.
    """

    def __init__(self, read: ClassifierFile, source: str) -> None:
        """Wraps a classifier that has been read from `source`."""
        described = read.description
        height, width = described.img_size
        super().__init__(
            ImageInput(
                (height, width),
                len(described.mean),
                described.mean,
                described.std,
                bands=Bands.of_entry(vars(described)),
                preprocessing=Preprocessing.of_entry(described.model_dump()),
            )
        )
        self.model, self.classes = read.model, tuple(described.classes)
        self.num_features, self.num_prefix_tokens = len(self.classes), 0
        labels = described.labels
        self.trained_on = (
            frozenset(one.fingerprint for one in (labels, *labels.elsewhere)) if labels else frozenset()
        )
        self._facts = {"start": source, "digest": read.digest}
        self.eval()

    def features(self, images: Tensor) -> Tensor:
        """Classifies normalized images: float32 (B, C, H, W) -> logits, float32 (B, K)."""
        return self.model.logits(images).float()

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Tensor:
        """Classifies normalized images from `transform`: float32 (B, C, H, W) -> probabilities (B, K)."""
        return self(images).softmax(dim=-1)

    def patch_map(self, images: Tensor) -> Tensor:
        """Raises TypeError: a classifier has only logits."""
        raise TypeError("a classifier has no map of patches: use load_encoder")

    def description(self) -> dict[str, Any]:
        """Returns JSON facts that determine the logits: source, digest, sizes, normalization."""
        images = self.input
        facts = {"img_size": list(images.img_size), "mean": list(images.mean), "std": list(images.std)}
        return {**self._facts, "classes": list(self.classes), **facts}

    def place(self, device: torch.device) -> None:
        """Moves the classifier to a device, and chooses the attention that is faster there."""
        choose_attention(self, device)
        super().place(device)


def load_classifier(run: str | os.PathLike[str]) -> ImageClassifier:
    """Loads the classifier of a fine-tuning run.

    Args:
        run: the folder of a finished run of mode "finetune", or its `model.safetensors`.

    Raises:
        InputError: if there is none.
    """
    name = os.fspath(run)
    return ImageClassifier(read_classifier(expand_path(name), name), name)
