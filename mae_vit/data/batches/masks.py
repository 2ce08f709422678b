"""Images with their masks: planes of a mask follow the channels of its image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mae_vit.core.errors import DamagedSample, InputError
from mae_vit.core.files import replacing
from mae_vit.data.batches.sources import Source
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.decode import DecodeError, decode_mask
from mae_vit.data.images.masks import crop_mask, id_table, numbered
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.samples import find_masks
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.data.shards.tar_headers import DamagedTar


class MaskedSource:
    """A source whose images carry their mask as further planes; `mae_vit.core.batch.Batch.class_map` reads them.

    A crop and a flip depend on the sample's key alone, so the mask draws those of its image once more.

    Attributes:
        mask_planes: one for up to 255 classes, else two.
    """

    # Masks are read from shards, wherever images are.
    in_memory = False

    def __init__(self, source: Source, index: ShardIndex, augment: Augment) -> None:
        """Finds the masks in the shards.

        Args:
            source: of the images of `index`.
            index: of a split with masks.
            augment: as `source` has it.

        Raises:
            InputError: if the split has no masks, an image has none, or images are not of 8 bits.
        """
        masks, dataset = index.split_info.masks, index.dataset
        if masks is None or dataset.segmentation is None:
            raise InputError(
                f'split "{index.split}" of {index.folder} has no masks: mae-vit prepare SRC OUT --masks DIR '
                "--mask-classes FILE writes them"
            )
        bands = dataset.bands
        if bands is not None and not bands.eight_bit:
            raise InputError(
                f"{index.folder} has masks beside images of {bands.dtype}: segmentation takes images of 8 bits "
                "without missing values (mae-vit prepare --take 8-bit)"
            )
        self._source, self._index, self._views = source, index, replace(augment, policy=None, erasing=0.0)
        self._table = id_table(dataset.segmentation.ids, dataset.segmentation.ignore)
        self._places = _mask_places(index)
        self.mask_planes = 1 if len(dataset.segmentation.classes) < 256 else 2

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), of the images, -1 where there is none."""
        return self._source.labels

    def labels_of(self, index: np.ndarray) -> np.ndarray:
        """Int (B,), the labels of samples `index` (B,)."""
        return self._source.labels_of(index)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C + P, H, W) of an augmented image with its mask."""
        channels, height, width = self._source.shape
        return channels + self.mask_planes, height, width

    @property
    def dtype(self) -> np.dtype:
        """Type of an augmented image's values."""
        return self._source.dtype

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Int64 (B,), the numbers in the split of the samples at `places` (B,)."""
        return self._source.numbers(places)

    def images(
        self,
        seed: int,
        epoch: int,
        samples: np.ndarray,
        views: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes augmented images and masks: (B, C + P, H, W) of `dtype`, see `Source`."""
        out = np.empty((len(samples), *self.shape), self.dtype) if out is None else out
        channels, damaged = self.shape[0] - self.mask_planes, dict[int, str]()
        masks = []
        for place, sample in enumerate(samples.tolist()):
            try:
                masks.append(self._read(sample))
            except (ReadError, DecodeError) as error:
                damaged[place] = f"mask: {error}"
                masks.append(np.zeros((1, 1), np.uint16))
        known = [(place, self._index.damage(int(samples[place]), why)) for place, why in damaged.items()]
        try:
            self._source.images(seed, epoch, samples, views, out[:, :channels])
        except DamagedSample as error:
            raise DamagedSample(
                sorted({**dict(known), **dict(error.damaged)}.items()), error.folder
            ) from None
        if known:
            raise DamagedSample(known, self._index.folder)
        sizes = np.array([mask.shape for mask in masks], np.int64)
        drawn = self._views.draw(seed, epoch, samples if views is None else views, sizes)
        for place, (mask, box, flip) in enumerate(zip(masks, drawn.boxes, drawn.flips, strict=True)):
            cut = crop_mask(mask, box, bool(flip), self._views.img_size)
            for plane in range(self.mask_planes):
                out[place, channels + plane] = cut >> 8 * plane & 0xFF
        return out

    def _read(self, sample: int) -> np.ndarray:
        """Reads a mask: class + 1 of each pixel, uint16 (H, W); 0 where it does not count."""
        return numbered(decode_mask(self._index.read_at(sample, *self._places[sample].tolist())), self._table)


def _mask_places(index: ShardIndex) -> np.ndarray:
    """Returns offset and length of each sample's mask in its shard, int64 (N, 2); finds them once.

    Raises:
        InputError: if a shard cannot be read, or an image has no mask.
    """
    path = index.cache_path("masks.npy")
    found = _kept_places(path, len(index))
    if found is None:
        keys, places = index.keys(), list[tuple[int, int]]()
        with index.locked():
            for number, shard in enumerate(index.split_info.shards):
                try:
                    masks = find_masks(index.fetch(number))
                    places += [masks[key] for key in keys[len(places) : len(places) + shard.samples]]
                except KeyError as error:
                    raise InputError(f"shard {shard.file} of {index.folder} has no mask of {error}") from None
                except (ReadError, DamagedTar, OSError) as error:
                    raise InputError(
                        f"masks of {index.folder}: shard {shard.file} cannot be read: {error}"
                    ) from None
            found = np.array(places, np.int64)
            with replacing(path) as partial, partial.open("wb") as file:
                np.save(file, found)
    return found


def _kept_places(path: Path, samples: int) -> np.ndarray | None:
    """Reads the places that were found before; None without them, or if a copy of the file was cut short."""
    try:
        found: np.ndarray = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (samples, 2) and found.dtype == np.int64 else None
