"""The classifier of a fine-tuning run, read from its `model.safetensors`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from torch import Tensor

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path, error_reason, plain_text
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.finetuning.models.classifiers import Classifier, NetworkClassifier, ViTClassifier
from mae_vit.finetuning.models.distillation import Distillation, DistilledViTClassifier
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.geometry import ViTGeometry, geometry_from
from mae_vit.models.sizes import Pool
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.containers import read_content
from mae_vit.weights.seen_labels import SeenLabels

FILE = "model.safetensors"
_WANTED = "the folder of a finished fine-tuning run"
_LARGEST_SIDE = 8192
# A distilled classifier that is read is not taught any more.
_UNTAUGHT = Distillation(torch.zeros_like, "hard", weight=0.0)


class Description(BaseModel):
    """The metadata of a `model.safetensors`. For a Vision Transformer it also has the fields of its geometry.

    Attributes:
        classes: names of the classes, in the order of the logits.
        mean: per-channel mean by which its images are normalized (pixels in 0..1).
        std: per-channel standard deviation.
        img_size: [H, W] in pixels.
        network: name of the network; None for our Vision Transformers.
        pool: pooling of our Vision Transformers.
        labels: the labels that it was trained on.
        bands: what the raw values of its images mean; None for 8 bits.
        preprocessing: what `prepare` did to its images.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    classes: list[str] = Field(min_length=2)
    mean: list[float]
    std: list[float]
    img_size: list[int] = Field(min_length=2, max_length=2)
    network: str | None = None
    pool: Pool = "cls"
    labels: SeenLabels | None = None
    bands: dict[str, Any] | None = None
    preprocessing: dict[str, Any] | None = None


@dataclass(frozen=True)
class ClassifierFile:
    """A classifier that has been read.

    Attributes:
        model: in evaluation mode, without gradients; it normalizes images as in its own training.
        description: the metadata of its file.
        digest: the first 16 hexadecimal digits of its file's SHA-256.
        distilled: whether it learned from a teacher.
    """

    model: Classifier
    description: Description
    digest: str
    distilled: bool


def read_classifier(path: Path, named: str) -> ClassifierFile:
    """Reads the `model.safetensors` of a fine-tuning run, or of its folder.

    Args:
        path: the file or the run folder.
        named: what messages call it.

    Raises:
        InputError: if the file cannot be read, or if it holds no classifier.
    """
    file = path / FILE if path.is_dir() else path
    try:
        metadata, tensors = read_content(file, wanted=_WANTED)
        if "segments" in metadata and "classes" not in metadata:
            raise InputError(f"{named} gives each pixel a class: it classifies no whole images")
        description = Description.model_validate(metadata)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError as error:
        hint = f"give {_WANTED}"
        if path.is_dir() and (path / "results.json").is_file():
            hint = 'only runs of finetune.mode="finetune" have one'
        elif path.is_dir() and (path / "encoder.safetensors").is_file():
            hint = f"a run of pretraining has no classes; fine-tune it first: mae-vit finetune --ckpt {path}"
        elif not path.exists() and (near := closest_path(path)):
            hint = near
        raise InputError(f"{named}: cannot read {file.name}: {error_reason(error)} ({hint})") from None
    except InputError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        raise InputError(f"{named} is not the {FILE} of a fine-tuning run") from None
    try:
        _check(description, tensors)
        model = _rebuild(description, tensors)
    except Exception as error:  # any malformed content of an untrusted file
        raise InputError(f"{named} cannot be rebuilt: {error_reason(error)[:160]}") from None
    model.eval().requires_grad_(False)
    return ClassifierFile(model, description, digest, "dist_token" in tensors)


def _check(description: Description, tensors: dict[str, Tensor]) -> None:
    """Checks what the shapes of tensors do not, and what would take long to build.

    Raises:
        ValueError: for what no run writes.
    """
    channels, classes = len(description.mean), description.classes
    if len(description.std) != channels or not all(value > 0 for value in description.std):
        raise ValueError(f"std={description.std} does not fit mean={description.mean}")
    bands = Bands.of_entry(vars(description))
    Preprocessing.of_entry(description.model_dump())
    if channels not in (1, 3) if bands.photographs else channels != len(bands.names):
        raise ValueError(f"mean={description.mean} does not fit its bands")
    if not all(1 <= side <= _LARGEST_SIDE for side in description.img_size):
        raise ValueError(f"img_size={description.img_size}: 1 to {_LARGEST_SIDE} each")
    if len(set(classes)) < len(classes) or any(plain_text(name) != name for name in classes):
        raise ValueError("names of classes are printable, and differ")
    if description.network is not None:
        return
    geometry = geometry_from(description.model_dump())
    if geometry is None or geometry.in_chans != channels:
        raise ValueError("its geometry is not known")
    if any(side % geometry.patch_size for side in geometry.img_size):
        raise ValueError(f"img_size={description.img_size} is not made of patches of {geometry.patch_size}")
    if not isinstance(geometry, ViTGeometry):
        return
    rows, columns = geometry.grid_size
    positions, expected = tensors["pos_embed"].shape[1], rows * columns + geometry.class_tokens
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if (positions, len(blocks)) != (expected, geometry.depth):
        raise ValueError(f"it has {positions} positions and {len(blocks)} blocks, not those of its geometry")


def _rebuild(description: Description, tensors: dict[str, Tensor]) -> Classifier:
    """Builds the described network and loads the tensors; raises on any mismatch."""
    common: dict[str, Any] = {
        "mean": description.mean,
        "std": description.std,
        "labels": LabelLoss(len(description.classes)),
        "bands": Bands.of_entry(vars(description)),
    }
    build: Callable[[], Classifier]
    if description.network is not None:
        name, prefix = description.network, "network."

        def build() -> Classifier:
            network = build_network(
                name,
                num_classes=len(description.classes),
                in_chans=len(description.mean),
                img_size=(description.img_size[0], description.img_size[1]),
            )
            return NetworkClassifier(network, **common)

    else:
        prefix = "encoder."
        geometry = geometry_from(description.model_dump())
        assert geometry is not None

        distilled = "dist_token" in tensors

        def build() -> Classifier:
            if distilled:
                encoder = geometry.build()
                assert isinstance(encoder, ViTEncoder)
                return DistilledViTClassifier(encoder, head_init="zero", distillation=_UNTAUGHT, **common)
            return ViTClassifier(geometry.build(), pool=description.pool, head_init="zero", **common)

    # Check the shapes on the meta device first: a small file may describe a network too large for memory.
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in build().state_dict().items()}
    state = {name if name in shapes else prefix + name: value for name, value in tensors.items()}
    if {name: value.shape for name, value in state.items()} != shapes:
        raise ValueError("its tensors are not those of the network that it names")
    with torch.device("meta"):
        build().logits(torch.zeros(1, len(description.mean), *description.img_size))
    model = build()
    model.load_state_dict(state, strict=True)
    return model
