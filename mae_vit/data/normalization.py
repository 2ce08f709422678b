"""Per-channel mean and standard deviation of pixels in 0..1."""

from __future__ import annotations

from collections.abc import Sequence

from mae_vit.core.errors import InputError
from mae_vit.data.shards.dataset_json import Dataset


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
            raise InputError(f"data.normalize={choice}: give [[{channels} means], [{channels} stds above 0]]")
        return tuple(choice[0]), tuple(choice[1])
    mean, std = tuple(dataset.mean), tuple(dataset.std)
    if choice == "imagenet":
        if not dataset.bands.photographs:
            raise InputError(
                f'data.normalize="imagenet" is of 8-bit RGB photographs; the images have {dataset.channels} bands of '
                f'{dataset.bands.dtype}: give data.normalize="dataset"'
            )
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    if len(mean) == 1 and channels == 3 and dataset.bands.photographs:
        mean, std = mean * 3, std * 3
    if len(mean) != channels:
        raise InputError(
            f'data.normalize="{choice}" has {len(mean)} channels, model.in_chans={channels}: '
            f'give model.in_chans={len(mean)} if the images are to keep theirs, else data.normalize="half" or '
            "[[mean], [std]]"
        )
    # The std of a constant channel is zero, and must not divide.
    smallest = 1e-3 if dataset.bands.photographs else 1e-6  # the scale may be far wider than the values
    return mean, tuple(max(value, smallest) for value in std)


# Statistics of ImageNet's channels, as in torchvision's models and the official MAE code.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
