"""Self-supervised pretraining of Vision Transformers: MAE and masked patch prediction.

import mae_vit

data = mae_vit.prepare("digits", "data/digits")            # or a folder of images, an archive, "cifar10"
run = mae_vit.pretrain("mae_digits", {"train.steps": 30})  # a preset, a YAML file or a mapping; returns a Run
tuned = mae_vit.finetune(run)                              # on the same data, with the recipe for its size
encoder = mae_vit.load_encoder("runs/mae_base")            # or encoder.safetensors, a .pth, "timm:NAME", "hf:USER/NAME"
features = encoder(encoder.transform("cat.jpg")[None])     # (1, D)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mae_vit.core import __version__
from mae_vit.core.files import settle_nameless_user

if TYPE_CHECKING:
    from mae_vit.cli.api import Run, compare, finetune, prepare, pretrain
    from mae_vit.core.errors import InputError
    from mae_vit.finetuning.models.classifier_file import (
        ImageClassifier,
        ImageSegmenter,
        load_classifier,
        load_segmenter,
    )
    from mae_vit.runtime.failures import RunInterrupted, TrainingFailed
    from mae_vit.weights.encoder import PretrainedEncoder, load_encoder

__all__ = [
    "ImageClassifier",
    "ImageSegmenter",
    "InputError",
    "PretrainedEncoder",
    "Run",
    "RunInterrupted",
    "TrainingFailed",
    "__version__",
    "compare",
    "finetune",
    "load_classifier",
    "load_encoder",
    "load_segmenter",
    "prepare",
    "pretrain",
]
_HOMES = {
    "mae_vit.cli.api": ("Run", "compare", "finetune", "prepare", "pretrain"),
    "mae_vit.core.errors": ("InputError",),
    "mae_vit.finetuning.models.classifier_file": (
        *("ImageClassifier", "load_classifier"),
        *("ImageSegmenter", "load_segmenter"),
    ),
    "mae_vit.runtime.failures": ("RunInterrupted", "TrainingFailed"),
    "mae_vit.weights.encoder": ("PretrainedEncoder", "load_encoder"),
}

# Before torch and others look for them.
settle_nameless_user()


def __getattr__(name: str) -> Any:
    """Loads torch and timm, which take seconds, only for those who ask."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
