"""The masks that lie beside the images of a split."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.files import replacing
from mae_vit.data.images.decode import DecodeError, decode_mask
from mae_vit.data.images.masks import id_table, numbered
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.samples import find_masks
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.data.shards.tar_headers import DamagedTar


class StoredMasks:
    """Reads the masks of a split."""

    def __init__(self, index: ShardIndex) -> None:
        """Finds the masks in the shards.

        Raises:
            InputError: if the split has no masks, an image has none, or images are not of 8 bits.
        """
        dataset = index.dataset
        if index.split_info.masks is None or dataset.segmentation is None:
            raise InputError(
                f'split "{index.split}" of {index.folder} has no masks: mae-vit prepare SRC OUT --masks DIR '
                "--mask-classes FILE writes them"
            )
        bands = dataset.bands
        if not bands.eight_bit:
            raise InputError(
                f"{index.folder} has masks beside images of {bands.dtype}: segmentation takes images of 8 bits "
                "without missing values (mae-vit prepare --take 8-bit)"
            )
        self._index = index
        self._table = id_table(dataset.segmentation.ids, dataset.segmentation.ignore)
        self._places = _mask_places(index)

    def read(self, sample: int) -> np.ndarray:
        """Reads a mask, uint16 (H, W): class + 1 of each pixel; 0 for pixels that do not count.

        Raises:
            DecodeError: if it cannot be read.
        """
        try:
            data = self._index.read_at(sample, *self._places[sample].tolist())
            return numbered(decode_mask(data), self._table)
        except (ReadError, DecodeError) as error:
            raise DecodeError(f"mask: {error}") from None


def _mask_places(index: ShardIndex) -> np.ndarray:
    """Returns offset and length of each sample's mask in its shard, int64 (N, 2); caches them in a file.

    Raises:
        InputError: if a shard cannot be read, or an image has no mask.
    """
    path = index.cache_path("masks.npy")
    with suppress(OSError, ValueError, EOFError):  # not there, or cut short
        stored: np.ndarray = np.load(path)
        if stored.shape == (len(index), 2) and stored.dtype == np.int64:
            return stored
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
        stored = np.array(places, np.int64)
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, stored)
    return stored
