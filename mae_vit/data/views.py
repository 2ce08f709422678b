"""How training images are seen, from the section `data.augment`."""

from __future__ import annotations

from collections.abc import Sequence

from mae_vit.config.data import AugmentSection
from mae_vit.core.errors import InputError
from mae_vit.data.images.augment import Augment, Interpolation
from mae_vit.data.images.auto_augment import make_policy
from mae_vit.data.index import ShardIndex
from mae_vit.data.normalization import fill_color

# Of photographs, as ImageNet's recipes have it.
_USUAL_SIDE = 224


def check_pad(crop: str, index: ShardIndex, img_size: tuple[int, int]) -> None:
    """Refuses a shifted crop of images that are not of the model's size.

    Raises:
        InputError: naming both sizes.
    """
    split = index.split_info
    stored = (split.height[0], split.width[0])
    if crop == "pad" and (stored != img_size or (split.height[1], split.width[1]) != img_size):
        height, width = (
            str(low) if low == high else f"{low}-{high}" for low, high in (split.height, split.width)
        )
        size = img_size[0] if img_size[0] == img_size[1] else list(img_size)
        # At the size of small images, larger ones lose detail without a word.
        side = min(split.height[0], split.width[0], _USUAL_SIDE) // 8 * 8
        larger = (
            f", and model.img_size={side} with a larger model.patch_size to train on more detail than {size} px have"
            if side > max(img_size)
            else ""
        )
        raise InputError(
            f'data.augment.crop="pad" needs images of model.img_size={size}, but '
            f'split "{index.split}" holds {height} x {width} px: use data.augment.crop=random_resized'
            + larger
        )


def make_augment(
    section: AugmentSection,
    img_size: tuple[int, int],
    mean: Sequence[float],
    interpolation: Interpolation = "bicubic",
) -> Augment:
    """Returns how training images are seen.

    Args:
        section: `data.augment`.
        img_size: (H, W) in pixels.
        mean: of the pixels in 0..1, by channel: the color of what a policy moves in from outside.
        interpolation: resizes crops.
    """
    return Augment(
        img_size=img_size,
        crop=section.crop,
        pad_px=section.pad_px or 0,
        scale=(section.scale[0], section.scale[1]) if section.scale else (1.0, 1.0),
        ratio=(section.ratio[0], section.ratio[1]) if section.ratio else (1.0, 1.0),
        flip=section.flip,
        policy=make_policy(section),
        erasing=section.erasing,
        fill=fill_color(mean),
        interpolation=interpolation,
    )
