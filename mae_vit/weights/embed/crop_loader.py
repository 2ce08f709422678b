"""From encoded images to equal-size pixels, on data processes.

Those import this file, so that it imports neither timm nor our networks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.data.batches.loader import load_in_order
from mae_vit.data.images.augment import center_crop
from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.weights.embed.images import Images

# A task of a data process: enough that its way there costs little, and little memory where images are large.
_TASK_IMAGES = 32
_TASK_BYTES = 8 << 20


class Unreadable(str):
    """Why an image cannot be used, in the place of its bytes."""


@dataclass(frozen=True)
class CropTask:
    """Images first..first+count-1.

    Attributes:
        first: number of the first.
        count: how many.
        data: their bytes; None where the data process reads them.
    """

    first: int
    count: int
    data: tuple[bytes | Unreadable, ...] | None


@dataclass(frozen=True)
class BatchPart:
    """What a task gives: a part of a batch.

    Attributes:
        first: number of its first image.
        count: images asked for.
        whole: int64 (K,), numbers of those that are whole.
        pixels: uint8 (K, C, H, W).
        broken: number and reason of the others.
    """

    first: int
    count: int
    whole: np.ndarray
    pixels: Tensor
    broken: list[tuple[int, str]]


class Crops(Dataset[BatchPart]):
    """Decodes and crops as `PretrainedEncoder.crop` does."""

    def __init__(self, images: Images, *, channels: int, img_size: tuple[int, int]) -> None:
        """Crops images to `img_size` in `channels` channels."""
        # Only those that can travel are read where this is used.
        self._images = images if images.travels else None
        self._channels, self._img_size = channels, img_size

    def __getitems__(self, task: CropTask) -> tuple[int, int, np.ndarray, Tensor, list[tuple[int, str]]]:
        """Returns the fields of a `BatchPart`: what the loader can put in page-locked memory."""
        whole, pixels, broken = list[int](), list[np.ndarray](), list[tuple[int, str]]()
        for place, image in enumerate(range(task.first, task.first + task.count)):
            cropped = self._crop(image, task.data[place] if task.data is not None else None)
            if isinstance(cropped, str):
                broken.append((image, cropped))
            else:
                whole.append(image)
                pixels.append(cropped)
        shape = (0, self._channels, *self._img_size)
        stacked = torch.from_numpy(np.stack(pixels) if pixels else np.zeros(shape, np.uint8))
        return task.first, task.count, np.array(whole, np.int64), stacked, broken

    def _crop(self, image: int, data: bytes | Unreadable | None) -> np.ndarray | Unreadable:
        if data is None:
            assert self._images is not None
            data = read(self._images, image)
        if isinstance(data, Unreadable):
            return data
        try:
            return center_crop(decode(data, self._channels), self._img_size)
        except DecodeError as error:
            return Unreadable(error)
        except MemoryError:
            return Unreadable("takes more memory than there is")


def read(images: Images, image: int) -> bytes | Unreadable:
    """Reads the bytes of an image, or says why it cannot."""
    try:
        return images.read(image)
    except OSError as error:
        return Unreadable(error_reason(error))
    except (ReadError, DecodeError) as error:
        return Unreadable(error)


class CropTasks:
    """All tasks from an image on, in order; none reaches from one batch into the next."""

    def __init__(self, images: Images, first: int, batch_size: int) -> None:
        """Begins batches of `batch_size` images at image `first`."""
        self._images, self._first, self._batch_size = images, first, batch_size

    def __iter__(self) -> Iterator[CropTask]:
        """Reads the bytes of those images that data processes cannot read."""
        for first in range(self._first, len(self._images), self._batch_size):
            stop = min(first + self._batch_size, len(self._images))
            if self._images.travels:
                for at in range(first, stop, _TASK_IMAGES):
                    yield CropTask(at, min(_TASK_IMAGES, stop - at), None)
            else:
                yield from self._read(first, stop)

    def _read(self, first: int, stop: int) -> Iterator[CropTask]:
        data: list[bytes | Unreadable] = []
        for image in range(first, stop):
            data.append(read(self._images, image))
            if len(data) == _TASK_IMAGES or sum(map(len, data)) >= _TASK_BYTES or image == stop - 1:
                yield CropTask(image + 1 - len(data), len(data), tuple(data))
                data = []


def load_pieces(
    images: Images,
    *,
    first: int,
    batch_size: int,
    channels: int,
    img_size: tuple[int, int],
    workers: int,
    pin_memory: bool,
) -> Iterator[list[BatchPart]]:
    """Yields the pieces of each batch, in order.

    Args:
        images: all of them.
        first: number of the image that the first batch begins with.
        batch_size: images of a batch, broken ones among them.
        channels: C.
        img_size: (H, W) in pixels.
        workers: data processes; 0 decodes in this one.
        pin_memory: for copies to a GPU.

    Raises:
        InputError: if a data process died.
    """
    crops = Crops(images, channels=channels, img_size=img_size)
    tasks = CropTasks(images, first, batch_size)
    pieces: list[BatchPart] = []
    try:
        for loaded in load_in_order(crops, tasks, workers=workers, pin_memory=pin_memory):
            pieces.append(BatchPart(*loaded))
            stop = pieces[-1].first + pieces[-1].count
            if stop == len(images) or (stop - first) % batch_size == 0:
                yield pieces
                pieces = []
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise InputError(
            "a process that decodes images died: too little memory (fewer --workers), or an image that crashes "
            "its decoder (--workers 0)"
        ) from None
