"""The teacher of distillation: a classifier from another fine-tuning run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.finetuning.models.classifier_file import Description, read_classifier
from mae_vit.finetuning.models.classifiers import Classifier


@dataclass(frozen=True)
class Teacher:
    """A trained, frozen classifier; call it with raw images.

    It is not a submodule of the student, so it is neither trained nor saved with it.

    Attributes:
        model: the classifier; it normalizes images as in its own training.
        description: the metadata of its file.
        digest: the first 16 hexadecimal digits of its file's SHA-256.
    """

    model: Classifier
    description: Description
    digest: str

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Classifies raw images on the model's device: (B, C, H, W) in 0..255 -> float32 (B, K)."""
        if images.is_meta:
            # A cost estimate of the student: the teacher's cost is not counted.
            return torch.empty(len(images), self.model.labels.num_classes, device="meta")
        return self.model.logits(self.model.normalize(images)).float()


def read_teacher(path: Path, *, classes: Sequence[str], in_chans: int, img_size: tuple[int, int]) -> Teacher:
    """Reads the `model.safetensors` of a fine-tuning run, or of its folder.

    Args:
        path: the file or the run folder.
        classes: names of the student's classes, in the order of the logits.
        in_chans: C of the student's images.
        img_size: (H, W) of the student's images.

    Raises:
        InputError: if the file cannot be read, or if it does not fit the student.
    """
    named = f"finetune.teacher={path}"
    read = read_classifier(path, named)
    description = read.description
    if read.distilled:
        raise InputError(f"{named} was distilled itself, which does not teach: give its own teacher")
    if description.classes != list(classes):
        raise InputError(
            f"{named} tells apart {len(description.classes)} classes ({', '.join(description.classes[:3])}, ...), "
            f"the data has {len(classes)} ({', '.join(classes[:3])}, ...)"
        )
    if len(description.mean) != in_chans:
        raise InputError(f"{named} takes {len(description.mean)} channels, model.in_chans={in_chans}")
    if tuple(description.img_size) != img_size:
        raise InputError(
            f"{named} takes images of {description.img_size}, the student's are {list(img_size)}"
        )
    return Teacher(read.model, description, read.digest)
