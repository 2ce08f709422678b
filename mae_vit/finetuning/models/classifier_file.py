"""Networks of fine-tuning runs, read from `model.safetensors`, for new images: of their classes or their pixels'.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path, error_reason, plain_text
from mae_vit.core.user_files import expand_path, name_given
from mae_vit.data.images.augment import center_boxes
from mae_vit.finetuning.models.classifiers import Classifier, NetworkClassifier, ViTClassifier
from mae_vit.finetuning.models.segmenter import Segmenter
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.geometry import Geometry, NetworkGeometry, ViTGeometry
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput, ImageLike
from mae_vit.weights.read import Weights, read_weights

FILE = "model.safetensors"
_LARGEST_SIDE = 8192


class ImageClassifier(FeatureEncoder):
    """A classifier with its image transform; its features are logits. `load_classifier` loads it.

    Attributes:
        classes: names of the K classes, in the order of the logits.
        trained_on: fingerprints of the prepared splits whose labels it has seen.
    """

    def __init__(self, model: Classifier, images: ImageInput, weights: Weights) -> None:
        """Wraps a classifier whose `weights` are already loaded."""
        super().__init__(images)
        self.model, self.classes = model.requires_grad_(False), weights.classes
        self.num_features, labels = len(self.classes), weights.labels
        self.trained_on = (
            frozenset(one.fingerprint for one in (labels, *labels.elsewhere)) if labels else frozenset()
        )
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
        raise TypeError("a classifier has no map of patches; use load_encoder")


class ImageSegmenter(FeatureEncoder):
    """A network for the classes of pixels, with its image transform. `load_segmenter` loads it.

    Attributes:
        classes: names of the K classes, in the order of the scores.
    """

    def __init__(self, model: Segmenter, images: ImageInput, weights: Weights) -> None:
        """Wraps a network whose `weights` are already loaded."""
        super().__init__(images)
        self.model, self.classes = model.requires_grad_(False), weights.classes
        self.num_features = len(self.classes)
        self.eval()

    def features(self, images: Tensor) -> Tensor:
        """Scores the pixels of normalized images: float32 (B, C, H, W) -> float32 (B, K, H, W)."""
        return self.model.score(images)

    @torch.inference_mode()
    def segment(self, image: ImageLike) -> np.ndarray:
        """Returns the class of each pixel of an image, which is what `transform` takes.

        The network sees the largest centered box of its aspect ratio; its scores are enlarged bilinearly.

        Returns:
            int64 (rows, columns) of the image after the changes of `prepare`: numbers of `classes`, -1 outside the box.
        """
        pixels = self.read(image)
        crop = np.require(self.crop_pixels(pixels), requirements="W")  # pixels from a file may be read-only
        images = torch.from_numpy(crop)[None].to(self.model.mean.device)
        (box,) = center_boxes(np.array([pixels.shape[1:]]), self.input.img_size).tolist()
        top, left, height, width = box
        scores = self(self.normalize(images))
        best = torch.full((height, width), -torch.inf, device=scores.device)
        numbers = torch.zeros((height, width), dtype=torch.int64, device=scores.device)
        for number in range(len(self.classes)):  # one at a time: all of a large photograph take gigabytes
            one = F.interpolate(scores[:, number : number + 1], (height, width), mode="bilinear")[0, 0]
            numbers[one > best] = number
            best = torch.maximum(best, one)
        classes = np.full(pixels.shape[1:], -1)
        classes[top : top + height, left : left + width] = numbers.cpu().numpy()
        return classes

    def patch_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: float32 (B, C, H, W) -> (B, D_map, rows, columns)."""
        return self.model.feature_map(images)


def load_classifier(run: str | os.PathLike[str]) -> ImageClassifier:
    """Loads the classifier of a finished run of mode "finetune", from its folder or its `model.safetensors`.

    Raises:
        InputError: if there is none.
    """
    return ImageClassifier(*_load(run, segments=False))


def load_segmenter(run: str | os.PathLike[str]) -> ImageSegmenter:
    """Loads the network of a finished run of mode "segment" or "segment_probe", likewise.

    Raises:
        InputError: if there is none.
    """
    return ImageSegmenter(*_load(run, segments=True))


def _load(run: str | os.PathLike[str], *, segments: bool) -> tuple[Any, ImageInput, Weights]:
    """Loads a network of classes, or of the classes of pixels."""
    named = name_given(run, "the folder of a fine-tuning run, or its model.safetensors")
    path = expand_path(named)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        what = f" has no {FILE}" if path.exists() else " does not exist"
        raise InputError(f"{named}{what} ({_find_nearest(path)})")
    weights = read_weights(str(file))
    if weights.geometry is None or not weights.classes:
        raise InputError(f"{named} is not the {FILE} of a fine-tuning run")
    if segments != _of_pixels(weights):
        kind, loads = ("an image", "classifier") if segments else ("pixels", "segmenter")
        raise InputError(f"{named} predicts classes of {kind}; use mae_vit.load_{loads} in Python")
    try:
        images = _check(weights, weights.geometry)
        model = _rebuild(weights, weights.geometry, images)
    except Exception as error:  # any malformed content of an untrusted file
        raise InputError(f"{named} cannot be rebuilt: {error_reason(error)[:160]}") from None
    return model, images, weights


def _of_pixels(weights: Weights) -> bool:
    return any(name.startswith("decode_head.") for name in weights.tensors)


def _find_nearest(path: Path) -> str:
    """Returns a hint for a path without a classifier."""
    if (path / "results.json").is_file():
        return "runs that score frozen features have none"
    if (path / "encoder.safetensors").is_file():
        return f"a run of pretraining has no classes; fine-tune it first: mae-vit finetune --ckpt {path}"
    if inside := sorted(path.glob(f"*/{FILE}")):
        # Of a comparison's row, a run with test results before those that chose settings.
        tested = (file for file in inside if (file.parent / "results.json").is_file())
        return f'did you mean "{next(tested, inside[0]).parent}"?'
    near = "" if path.exists() else closest_path(path)
    return near or "give the folder of a finished fine-tuning run"


def _check(weights: Weights, geometry: Geometry) -> ImageInput:
    """Returns its images; raises ValueError for what tensor shapes do not show, or what would take long to build."""
    mean, std, bands = weights.mean or (), weights.std or (), weights.bands
    channels, classes = geometry.in_chans, weights.classes
    if not len(mean) == len(std) == channels:
        raise ValueError(f"mean={mean} and std={std} do not fit {channels} channels")
    if channels not in (1, 3) if bands.photographs else channels != len(bands.names):
        raise ValueError(f"mean={mean} does not fit its bands")
    if not all(1 <= side <= _LARGEST_SIDE for side in geometry.img_size):
        raise ValueError(f"img_size={geometry.img_size}: each must be 1 to {_LARGEST_SIDE}")
    if len(set(classes)) < len(classes) or any(plain_text(name) != name for name in classes):
        raise ValueError("names of classes must be printable and differ")
    blocks = {name.split(".")[1] for name in weights.tensors if name.startswith("blocks.")}
    if isinstance(geometry, ViTGeometry) and len(blocks) != geometry.depth:
        raise ValueError(f"it has {len(blocks)} blocks, not the {geometry.depth} of its geometry")
    return ImageInput(
        geometry.img_size, channels, mean, std, bands=bands, preprocessing=weights.preprocessing
    )


def _rebuild(weights: Weights, geometry: Geometry, images: ImageInput) -> Classifier | Segmenter:
    """Builds the described network and loads the tensors; raises on any mismatch."""
    pixels = _of_pixels(weights)
    channels, size = images.in_chans, images.img_size

    def build() -> Classifier | Segmenter:
        common: dict[str, Any] = {"mean": images.mean, "std": images.std, "bands": images.bands}
        if pixels:
            encoder = geometry.build()
            probe = "decode_head.norm.running_mean" in weights.tensors
            return Segmenter(
                encoder, probe=probe, num_classes=len(weights.classes), label_smoothing=0.0, **common
            )
        common["labels"] = LabelLoss(len(weights.classes))
        if isinstance(geometry, NetworkGeometry):
            network = build_network(
                geometry.size, num_classes=len(weights.classes), in_chans=channels, img_size=size
            )
            return NetworkClassifier(network, **common)
        return ViTClassifier(geometry.build(), pool=weights.pool, head_init="zero", **common)

    # Check the shapes on the meta device first: a small file may describe a network too large for memory.
    with torch.device("meta"):
        empty = build().eval()
        empty.logits(torch.zeros(1, images.in_chans, *images.img_size))
    shapes = {name: value.shape for name, value in empty.state_dict().items()}
    prefix = f"encoder.{geometry.holder}" if pixels else geometry.holder or "encoder."
    state = {name if name in shapes else prefix + name: value for name, value in weights.tensors.items()}
    if {name: value.shape for name, value in state.items()} != shapes:
        raise ValueError("its tensors are not those of the network that it names")
    model = build()
    model.load_state_dict(state, strict=True)
    return model
