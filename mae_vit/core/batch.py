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
        keys: the samples' (seed, epoch, index), from which masks are drawn.
        damaged: samples of the order that cannot be read; other samples replace them.
    """

    images: Tensor
    labels: Tensor
    keys: SampleKeys
    damaged: tuple[Damage, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """Moves all tensors, without blocking where their memory is pinned."""
        keys = SampleKeys(self.keys.seed, self.keys.epoch, self.keys.index.to(device, non_blocking=True))
        images = self.images.to(device, non_blocking=True)
        return Batch(images, self.labels.to(device, non_blocking=True), keys, self.damaged)
