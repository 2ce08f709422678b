"""The batch that the loader passes to an objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mae_vit.core.errors import Damage
from mae_vit.core.keyed_rng import SampleKeys


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: a slice of the epoch's global order.

    Attributes:
        images: (B, C, H, W), raw pixels after crop and flip: uint8, or the type of the data set's bands.
        labels: int64 (B,), -1 where the data has none.
        keys: the samples' (seed, epoch, index), by which masks are drawn.
        damaged: samples of the order that cannot be read; others replace them.
        masks: uint16 (B, H, W), class + 1 of each pixel, 0 where it does not count; None for data without masks.
    """

    images: Tensor
    labels: Tensor
    keys: SampleKeys
    damaged: tuple[Damage, ...] = ()
    masks: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Moves all tensors, without blocking where their memory is pinned."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        keys = SampleKeys(self.keys.seed, self.keys.epoch, move(self.keys.index))
        masks = None if self.masks is None else move(self.masks)
        return Batch(move(self.images), move(self.labels), keys, self.damaged, masks)

    def class_map(self) -> Tensor:
        """Returns the class of each pixel: int64 (B, H, W), -1 where it does not count."""
        assert self.masks is not None
        return self.masks.long() - 1
