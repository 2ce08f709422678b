"""The classifier of a fine-tuning run, read from its `model.safetensors`, for new images.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from torch import Tensor

from mae_vit.config.encoders import section_class
from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path, error_reason, plain_text
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.core.user_files import expand_path, name_given
from mae_vit.finetuning.models.classifiers import Classifier, NetworkClassifier, ViTClassifier
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.geometry import ViTGeometry, geometry_from
from mae_vit.models.sizes import Pool
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.containers import read_content
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.seen_labels import SeenLabels
from mae_vit.weights.unwrap import find_network

FILE = "model.safetensors"
_WANTED = "the folder of a finished fine-tuning run"
_LARGEST_SIDE = 8192


class Description(BaseModel):
    """The metadata of a `model.safetensors`. For a Vision Transformer it also has the fields of its geometry.

    Attributes:
        classes: names of the classes, in the order of the logits.
        mean: channel means by which its images are normalized (pixels in 0..1).
        std: standard deviations of the channels.
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


class ImageClassifier(FeatureEncoder):
    """A classifier with its image transform; its features are logits. `load_classifier` loads it.

    Attributes:
        classes: names of the K classes, in the order of the logits.
        trained_on: fingerprints of the prepared splits whose labels it has seen.
    """

    def __init__(self, model: Classifier, images: ImageInput, described: Description) -> None:
        """Wraps a classifier whose weights are already loaded."""
        super().__init__(images)
        self.model, self.classes = model.requires_grad_(False), tuple(described.classes)
        self.num_features = len(self.classes)
        labels = described.labels
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


def load_classifier(run: str | os.PathLike[str]) -> ImageClassifier:
    """Loads the classifier of a finished run of mode "finetune", from its folder or its `model.safetensors`.

    Raises:
        InputError: if there is none.
    """
    named = name_given(run, "the folder of a fine-tuning run, or its model.safetensors")
    path = expand_path(named)
    file = path / FILE if path.is_dir() else path
    try:
        metadata, tensors = read_content(file, wanted=_WANTED)
        if "segments" in metadata and "classes" not in metadata:
            raise InputError(f"{named} gives each pixel a class: it classifies no whole images")
        description = Description.model_validate(metadata)
        family = metadata.get("family") or "vit"
        section_class(family, named)
        is_vit = description.network is None and family == "vit"
        if is_vit and (found := find_network(tensors, named)):
            tensors = found[0]  # an export may have the names of transformers
    except OSError as error:
        hint = f"give {_WANTED}"
        if path.is_dir() and (path / "results.json").is_file():
            hint = 'only runs of finetune.mode="finetune" have one'
        elif path.is_dir() and (path / "encoder.safetensors").is_file():
            hint = f"a run of pretraining has no classes; fine-tune it first: mae-vit finetune --ckpt {path}"
        elif not path.exists() and (near := closest_path(path)):
            hint = near
        elif inside := sorted(path.glob(f"*/{FILE}")):
            # Of a comparison's row, a run with test results before those that chose settings.
            tested = (file for file in inside if (file.parent / "results.json").is_file())
            hint = f'did you mean "{next(tested, inside[0]).parent}"?'
        what = f": cannot read {file.name}: {error_reason(error)}" if path.exists() else " does not exist"
        raise InputError(f"{named}{what} ({hint})") from None
    except InputError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        raise InputError(f"{named} is not the {FILE} of a fine-tuning run") from None
    try:
        images = _check(description, tensors)
        model = _rebuild(description, images, tensors)
    except Exception as error:  # any malformed content of an untrusted file
        raise InputError(f"{named} cannot be rebuilt: {error_reason(error)[:160]}") from None
    return ImageClassifier(model, images, description)


def _check(description: Description, tensors: dict[str, Tensor]) -> ImageInput:
    """Returns its images; raises ValueError for what tensor shapes do not show, or what would take long to build."""
    channels, classes = len(description.mean), description.classes
    if len(description.std) != channels or not all(value > 0 for value in description.std):
        raise ValueError(f"std={description.std} does not fit mean={description.mean}")
    bands = Bands.of_entry(vars(description))
    preprocessing = Preprocessing.of_entry(description.model_dump())
    height, width = description.img_size
    images = ImageInput(
        (height, width), channels, description.mean, description.std, bands=bands, preprocessing=preprocessing
    )
    if channels not in (1, 3) if bands.photographs else channels != len(bands.names):
        raise ValueError(f"mean={description.mean} does not fit its bands")
    if not all(1 <= side <= _LARGEST_SIDE for side in description.img_size):
        raise ValueError(f"img_size={description.img_size}: each must be 1 to {_LARGEST_SIDE}")
    if len(set(classes)) < len(classes) or any(plain_text(name) != name for name in classes):
        raise ValueError("names of classes must be printable and differ")
    if description.network is not None:
        return images
    geometry = geometry_from(description.model_dump())
    if geometry is None or geometry.in_chans != channels:
        raise ValueError("its geometry is not known")
    if any(side % geometry.patch_size for side in geometry.img_size):
        raise ValueError(f"img_size={description.img_size} is not made of patches of {geometry.patch_size}")
    if not isinstance(geometry, ViTGeometry):
        return images
    rows, columns = geometry.grid_size
    positions, expected = tensors["pos_embed"].shape[1], rows * columns + geometry.class_tokens
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if (positions, len(blocks)) != (expected, geometry.depth):
        raise ValueError(f"it has {positions} positions and {len(blocks)} blocks, not those of its geometry")
    return images


def _build(description: Description, images: ImageInput) -> Classifier:
    """Builds the described network with fresh weights."""
    common: dict[str, Any] = {"mean": images.mean, "std": images.std, "bands": images.bands}
    common["labels"] = LabelLoss(len(description.classes))
    if description.network is not None:
        network = build_network(
            description.network,
            num_classes=len(description.classes),
            in_chans=images.in_chans,
            img_size=images.img_size,
        )
        return NetworkClassifier(network, **common)
    geometry = geometry_from(description.model_dump())
    assert geometry is not None, "`_check` has refused it"
    return ViTClassifier(geometry.build(), pool=description.pool, head_init="zero", **common)


def _rebuild(description: Description, images: ImageInput, tensors: dict[str, Tensor]) -> Classifier:
    """Builds the described network and loads the tensors; raises on any mismatch."""
    # Check the shapes on the meta device first: a small file may describe a network too large for memory.
    with torch.device("meta"):
        empty = _build(description, images).eval()
        empty.logits(torch.zeros(1, images.in_chans, *images.img_size))
    shapes = {name: value.shape for name, value in empty.state_dict().items()}
    prefix = "encoder." if description.network is None else "network."
    state = {name if name in shapes else prefix + name: value for name, value in tensors.items()}
    if {name: value.shape for name, value in state.items()} != shapes:
        raise ValueError("its tensors are not those of the network that it names")
    model = _build(description, images)
    model.load_state_dict(state, strict=True)
    return model
