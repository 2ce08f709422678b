"""Draws images for an inspection from a folder, an archive or prepared shards, always the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.image_rows import Picture, in_colors
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.data_path import is_unprepared, resolve_data_path
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.images.preprocess import preprocess
from mae_vit.data.index import open_index
from mae_vit.data.order.permutation import draw_some
from mae_vit.data.prepare.sources.find import find_images, naming_prepare
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.weights.feature_encoder import fit_bands

# Splits to take images from, best first: images that were not trained on.
_SPLITS = ("val", "test", "train")
# A constant, so that every encoder gets the same images and masks.
_SEED = 0
_FETCHED = 4


@dataclass(frozen=True)
class Samples:
    """Images, as an encoder takes them.

    Attributes:
        images: (n, C, H, W), uint8 or raw values of `bands`.
        source: describes where they come from.
        passed_over: number of images that could not be decoded.
        bands: what raw values mean.
        picture_bands: the bands that they are drawn in; None chooses.
    """

    images: Tensor
    source: str
    passed_over: int = 0
    bands: Bands = RGB8
    picture_bands: Sequence[int | str] | None = None

    def unit(self, count: int) -> Tensor:
        """Returns the first images in 0..1, with 0 for missing values: (n, C, H, W)."""
        images = self.images[:count]
        unit, valid = self.bands.unit(images), self.bands.valid(images)
        return unit if valid is None else torch.where(valid, unit, 0.0)

    def shown(self, count: int) -> Picture:
        """Returns the first images in colors or gray, for drawing."""
        return in_colors([Picture("image", self.unit(count))], self.bands, self.picture_bands)[0]._replace(
            label="image"
        )

    def batch(self, count: int) -> Batch:
        """Returns the first images as a batch without labels, with keys to draw masks from."""
        images = self.images[:count]
        keys = SampleKeys(_SEED, 0, torch.arange(len(images)))
        return Batch(images, torch.full((len(images),), -1), keys)


def draw_samples(data: str, *, count: int, encoder: EncoderInfo, split: str | None = None) -> Samples:
    """Draws at most `count` images by a key, without augmentation: the largest centered box, resized.

    From prepared data it takes the first of val, test and train unless a split is given. Raises InputError if there is
    nothing to look at.
    """
    # Given a split, prepare files first: before, they belong to none.
    prepared = split is not None or is_url(data) or not is_unprepared(Path(data))
    preprocessing, bands, where = encoder.preprocessing, encoder.bands, data
    with tempfile.TemporaryDirectory(prefix="mae-vit-inspect-") as scratch:
        if prepared:
            folder, remote = resolve_data_path(data)
            there = read_dataset(folder).splits
            chosen = split or next((name for name in _SPLITS if name in there), next(iter(there)))
            index, where = open_index(folder, chosen, remote=remote), redact_url(data)
            # Only the first remote shards: each is downloaded whole.
            shards = index.split_info.shards[: _FETCHED if remote else None]
            numbers = draw_some(count, sum(shard.samples for shard in shards)).tolist()
            readers: list[Callable[[], bytes]] = [partial(index.read, number) for number in numbers]
            preprocessing, bands = encoder.preprocessing.of_prepared, index.dataset.bands
        else:
            with naming_prepare(data):
                source = find_images(os.path.join(".", data), out=Path(scratch), labels=False)
            readers = [source.entries[place].read for place in draw_some(count, len(source.entries))]
        images = []
        for read in readers:
            with suppress(OSError, ReadError, DecodeError):
                images.append(preprocess(read(), encoder.in_chans, preprocessing, bands))
    of_split = f', split "{chosen}"' if prepared else ""
    if not images:
        raise InputError(f"{where}{of_split}: none of the drawn images can be decoded; give other images")
    augment = Augment(img_size=encoder.img_size, bands=bands)
    pixels = augment.apply(images, augment.draw(_SEED, 0, np.arange(len(images))))
    lost, fitted = len(readers) - len(images), fit_bands(encoder.bands, bands, where)
    return Samples(torch.from_numpy(pixels), where + of_split, lost, fitted)
