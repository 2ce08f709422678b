"""The teacher of distillation: a classifier from another fine-tuning run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mae_vit.baselines import build_network
from mae_vit.errors import InputError
from mae_vit.objectives.classify import Classifier, NetworkClassifier, ViTClassifier
from mae_vit.objectives.labels import LabelLoss
from mae_vit.weights import EncoderInfo

_FILE = "model.safetensors"


@dataclass(frozen=True)
class Teacher:
    """A trained classifier, frozen; called with raw images.

    No module of the student's: it is neither trained nor saved with it.

    Attributes:
        model: normalizes images as it was trained itself.
        digest: of its file.
    """

    model: Classifier
    digest: str

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Classifies raw images: (B, C, H, W) in 0..255 -> float32 (B, K)."""
        if images.is_meta:
            # A student's costs are estimated without its teacher's.
            return torch.empty(len(images), self.model.labels.num_classes, device="meta")
        # Moves once; a teacher is asked on one device.
        model = self.model.to(images.device)
        return model.logits(model.normalize(images)).float()


def read_teacher(path: Path, *, classes: Sequence[str], in_chans: int, img_size: tuple[int, int]) -> Teacher:
    """Reads the `model.safetensors` of a fine-tuning run, or of its folder.

    Args:
        path: of either.
        classes: what the student tells apart, in order.
        in_chans: C of the student's images.
        img_size: (H, W) of them.

    Raises:
        InputError: if there is none, or if it does not fit the student.
    """
    file = path / _FILE if path.is_dir() else path
    try:
        with safe_open(file, framework="pt") as content:
            told = json.loads((content.metadata() or {})["mae_vit"])
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        theirs, mean, std = list(told["classes"]), list(told["mean"]), list(told["std"])
    except OSError as error:
        raise InputError(
            f"finetune.teacher={path}: cannot read {file.name}: {(error.strerror or str(error)).lower()} "
            "(give the folder of a finished fine-tuning run)"
        ) from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise InputError(f"finetune.teacher={path} is not the {_FILE} of a fine-tuning run") from None
    if theirs != list(classes):
        raise InputError(
            f"finetune.teacher={path} tells apart {len(theirs)} classes ({', '.join(theirs[:3])}, ...), "
            f"the data has {len(classes)} ({', '.join(classes[:3])}, ...)"
        )
    if len(mean) != in_chans:
        raise InputError(f"finetune.teacher={path} takes {len(mean)} channels, model.in_chans={in_chans}")
    labels = LabelLoss(len(theirs))
    try:
        model: Classifier
        if "network" in told:
            network = build_network(
                told["network"], num_classes=len(theirs), in_chans=in_chans, img_size=img_size
            )
            model = NetworkClassifier(network, mean=mean, std=std, labels=labels)
            prefix = "network."
        else:
            pool = told.pop("pool")
            del told["classes"]
            info = EncoderInfo(**{**told, "img_size": tuple(told["img_size"])})
            if info.img_size != img_size:
                raise InputError(
                    f"finetune.teacher={path} takes images of {list(info.img_size)}, the student's are {list(img_size)}"
                )
            model = ViTClassifier(
                info.build(), pool=pool, head_init="zero", mean=mean, std=std, labels=labels
            )
            prefix = "encoder."
        own = set(model.state_dict())
        named = {name if name in own else prefix + name: value for name, value in tensors.items()}
        model.load_state_dict(named, strict=True)
    except InputError:
        raise
    except Exception as error:  # any malformed content of an untrusted file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"finetune.teacher={path} cannot be rebuilt: {reason[:160]}") from None
    model.eval().requires_grad_(False)
    return Teacher(model, hashlib.sha256(file.read_bytes()).hexdigest()[:16])
