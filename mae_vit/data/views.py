"""How training images are seen: their augmentation by the section `data.augment`, and their normalization."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mae_vit.config.data import POLICIES, AugmentSection
from mae_vit.core.errors import InputError
from mae_vit.data.images.augment import Augment, BatchPolicy, Interpolation, Policy
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.dataset_json import Dataset

# Statistics of ImageNet's channels, as in torchvision's models and the official MAE code.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def check_pad(crop: str, index: ShardIndex, img_size: tuple[int, int]) -> None:
    """Rejects `crop="pad"` for images that do not have the model's size.

    Raises:
        InputError: if the sizes differ, naming both.
    """
    if crop == "pad" and index.one_size != img_size:
        sides = index.split_info.height, index.split_info.width
        height, width = (str(low) if low == high else f"{low}-{high}" for low, high in sides)
        size = img_size[0] if img_size[0] == img_size[1] else list(img_size)
        raise InputError(
            f'data.augment.crop="pad" needs images of model.img_size={size}, but split "{index.split}" has '
            f"{height} x {width} px; use data.augment.crop=random_resized, or a model.img_size near theirs"
        )


def make_augment(
    section: AugmentSection,
    img_size: tuple[int, int],
    mean: Sequence[float],
    interpolation: Interpolation = "bicubic",
) -> Augment:
    """Builds the augmentation of training images of (H, W) px; policies move in the mean color (0..1) from outside."""
    return Augment(
        img_size=img_size,
        crop=section.crop,
        pad_px=section.pad_px,
        scale=(section.scale[0], section.scale[1]),
        ratio=(section.ratio[0], section.ratio[1]),
        flip=section.flip,
        policy=make_policy(section),
        erasing=section.erasing,
        fill=fill_color(mean),
        interpolation=interpolation,
    )


def make_policy(section: AugmentSection) -> Policy | BatchPolicy | None:
    """Builds the policy of `data.augment.policy`; None for "none"."""
    module, _, name = POLICIES[section.policy].partition(":")
    if not module:
        return None
    policy: Policy | BatchPolicy = getattr(import_module(module), name)(**section.options_of("policy"))
    return policy


def fill_color(mean: Sequence[float]) -> tuple[int, ...]:
    """Returns the uint8 color nearest to a mean of pixels in 0..1 (timm's `img_mean`)."""
    return tuple(min(255, max(0, round(255 * value))) for value in mean)


def normalization(
    choice: str | Sequence[Sequence[float]], dataset: Dataset, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Resolves `data.normalize` to per-channel mean and std of pixels in 0..1 (of bands in unit scale).

    Raises:
        InputError: if the statistics do not fit the channels.
    """
    if choice == "half":
        return (0.5,) * channels, (0.5,) * channels
    if not isinstance(choice, str):
        if len(choice) != 2 or any(len(part) != channels for part in choice) or min(choice[1]) <= 0:
            raise InputError(
                f"data.normalize={choice}: must be [[{channels} means], [{channels} stds above 0]]"
            )
        return tuple(choice[0]), tuple(choice[1])
    mean, std = tuple(dataset.mean), tuple(dataset.std)
    if choice == "imagenet":
        if not dataset.bands.photographs:
            raise InputError(
                f'data.normalize="imagenet" is for 8-bit RGB photographs; the images have {dataset.channels} bands '
                f'of {dataset.bands.dtype}. Give data.normalize="dataset"'
            )
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    if len(mean) == 1 and channels == 3 and dataset.bands.photographs:
        mean, std = mean * 3, std * 3
    if len(mean) != channels:
        raise InputError(
            f'data.normalize="{choice}" has {len(mean)} channels, but model.in_chans={channels}; give '
            f'model.in_chans={len(mean)}, or data.normalize="half" or [[mean], [std]]'
        )
    # The std of a constant channel is zero, and must not divide.
    smallest = 1e-3 if dataset.bands.photographs else 1e-6  # the scale may be far wider than the values
    return mean, tuple(max(value, smallest) for value in std)
