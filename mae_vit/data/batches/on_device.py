"""Small images that lie on the training device, and their batches, which are computed there.

The host draws the views and sends a few numbers for each image. Batches equal those of `load_batches` to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.errors import Damage, DamagedSample, InputError
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.batches.loader import skip_damaged
from mae_vit.data.batches.sources import MemorySource
from mae_vit.data.images.augment import BatchPolicy
from mae_vit.data.images.batched import MOST_PX, boxes_and_flips, cached_crop, resizes, shift
from mae_vit.data.order.order import view_keys

# Largest share of a GPU's free memory that images take by "auto": the model and its activations need the rest.
_SHARE = 1 / 16
_BLOCK_BYTES = 1 << 26  # copied to the device at once


class Place(NamedTuple):
    """Where views are computed, and why; empty on a CPU, which is both."""

    on_device: bool
    why: str = ""


def choose_place(
    asked: Literal["auto", "host", "device"],
    source: AugmentedSource,
    *,
    workers: int | Literal["auto"],
    device: torch.device,
) -> Place:
    """Resolves `data.augment.device`. "auto" is the device if it is a GPU that can do it and has the memory.

    Raises:
        InputError: if "device" is given and it cannot.
    """
    if asked == "host":
        return Place(False, "data.augment.device=host")
    why = _why_on_host(source, workers)
    if asked == "device":
        if why:
            raise InputError(f"data.augment.device=device cannot be: {why}; use data.augment.device=auto")
        return Place(True, "data.augment.device=device")
    if device.type != "cuda":
        return Place(False)
    if why:
        return Place(False, f"auto: {why}")
    assert isinstance(source.source, MemorySource)
    images = len(source) * math.prod(source.source.image_shape) / 2**30
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if images > _SHARE * free:
        return Place(
            False,
            f"auto: the images take {images:.2g} GiB, more than a sixteenth of the GPU's free {free:.3g} GiB; "
            "data.augment.device=device keeps them there all the same",
        )
    return Place(True, f"auto: the images take {images:.2g} of its free {free:.3g} GiB")


def _why_on_host(source: AugmentedSource, workers: int | Literal["auto"]) -> str:
    """Returns why views must be computed on the host; empty if a device can compute them."""
    augment, images = source.augment, source.source
    if not isinstance(images, MemorySource):
        return "images are read from shards (data.source), not kept in memory"
    if images.has_masks:
        return "images have masks"
    if not augment.bands.eight_bit:
        return f"images are bands of {augment.bands.dtype}"
    _, height, width = images.image_shape
    if max(height, width, *augment.img_size) > MOST_PX:
        return f"images of {height} x {width} px are too large, above {MOST_PX} px"
    if augment.erasing:
        return f"data.augment.erasing={augment.erasing:g} works on single images"
    if augment.policy is not None and not isinstance(augment.policy, BatchPolicy):
        return f"data.augment.policy={augment.policy.name} works on single images"
    if workers not in ("auto", 0):
        return f"data.workers={workers} asks for processes"
    return ""


class DeviceImages:
    """The images of a source on a device.

    Attributes:
        damaged: samples that cannot be read, by place; others replace them.
    """

    def __init__(self, source: AugmentedSource, device: torch.device, *, seed: int, repeats: int) -> None:
        """Copies all images to `device`; batches are those of a run's `seed`, with `repeats` views of each image."""
        memory = source.source
        assert isinstance(memory, MemorySource)
        self._source, self._device, self._seed, self._repeats = source, device, seed, repeats
        self._labels, self._folder = memory.index.labels, memory.index.folder
        augment, self._size = source.augment, memory.image_shape[1:]
        self._crop: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = shift
        if resizes(augment, self._size):
            self._crop = cached_crop(self._size, augment.img_size, augment.interpolation, device)
        self._images = torch.empty((len(source), *memory.image_shape), dtype=torch.uint8, device=device)
        self.damaged = dict[int, Damage]()
        together = max(1, _BLOCK_BYTES // math.prod(memory.image_shape))
        for first in range(0, len(source), together):
            self._fill(np.arange(first, min(first + together, len(source))), memory)

    def _fill(self, places: np.ndarray, memory: MemorySource) -> None:
        """Copies the intact images at `places`; notes the others."""
        try:
            pixels = memory.gather(self._source.numbers(places))
        except DamagedSample as error:
            self.damaged |= {int(places[position]): damage for position, damage in error.damaged}
            self._fill(np.delete(places, [position for position, _ in error.damaged]), memory)
            return
        where, images = (torch.from_numpy(array).to(self._device) for array in (places, pixels))
        self._images.index_copy_(0, where, images)

    def batch(self, epoch: int, index: np.ndarray) -> Batch:
        """Returns the batch of an epoch and places int64 (B,), on the device.

        Raises:
            DamagedSample: if no intact image is left.
        """
        places, passed, stuck = skip_damaged(index, self.damaged, len(self._source))
        if stuck:
            raise DamagedSample(stuck, self._folder)
        numbers, augment = self._source.numbers(places), self._source.augment
        drawn = augment.draw(self._seed, epoch, view_keys(numbers, self._repeats))
        boxes = boxes_and_flips(augment, drawn, self._size)
        calls = () if drawn.calls is None else drawn.calls.T
        # One copy for all. Keys follow the order, as in `load_batches`.
        rows = [places, self._labels[numbers], view_keys(index, self._repeats), *boxes.T, *calls]
        numbers_sent = torch.from_numpy(np.array(rows, np.int64))
        if self._device.type == "cuda":  # from pinned memory the copy does not block
            numbers_sent = numbers_sent.pin_memory()
        sent = numbers_sent.to(self._device, non_blocking=True)
        views = self._crop(self._images.index_select(0, sent[0]), sent[3:8].T)
        if isinstance(augment.policy, BatchPolicy):
            views = augment.policy.apply_batch(views, sent[8:].T)
        return Batch(views, sent[1], SampleKeys(self._seed, epoch, sent[2]), tuple(passed.values()))
