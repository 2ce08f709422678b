"""Builds the augmentation of training images from the section `data.augment`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mae_vit.config.data import POLICIES, AugmentSection
from mae_vit.core.errors import InputError
from mae_vit.data.images.augment import Augment, Interpolation, Policy
from mae_vit.data.index import ShardIndex


def check_pad(crop: str, index: ShardIndex, img_size: tuple[int, int]) -> None:
    """Rejects `crop="pad"` for images that do not have the model's size.

    Raises:
        InputError: if the sizes differ, naming both.
    """
    split = index.split_info
    stored = (split.height[0], split.width[0])
    if crop == "pad" and (stored != img_size or (split.height[1], split.width[1]) != img_size):
        height, width = (
            str(low) if low == high else f"{low}-{high}" for low, high in (split.height, split.width)
        )
        size = img_size[0] if img_size[0] == img_size[1] else list(img_size)
        raise InputError(
            f'data.augment.crop="pad" needs images of model.img_size={size}, but '
            f'split "{index.split}" holds {height} x {width} px: use data.augment.crop=random_resized, '
            "or a model.img_size near theirs"
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


def make_policy(section: AugmentSection) -> Policy | None:
    """Builds the policy of `data.augment.policy`; None for "none"."""
    module, _, name = POLICIES[section.policy].partition(":")
    if not module:
        return None
    policy: Policy = getattr(import_module(module), name)(**section.options_of("policy"))
    return policy


def fill_color(mean: Sequence[float]) -> tuple[int, ...]:
    """Returns the uint8 color nearest to a mean of pixels in 0..1 (timm's `img_mean`)."""
    return tuple(min(255, max(0, round(255 * value))) for value in mean)
