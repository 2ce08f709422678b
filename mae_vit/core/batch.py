"""The batch that the loader passes to an objective."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        masks: uint8 (B, P, H, W), the pixels' classes as `class_map` reads them; None for data without masks.
    """

    images: Tensor
    labels: Tensor
    keys: SampleKeys
    damaged: tuple[Damage, ...] = ()
    masks: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Moves all tensors, without blocking where their memory is pinned."""
        keys = SampleKeys(self.keys.seed, self.keys.epoch, self.keys.index.to(device, non_blocking=True))
        images = self.images.to(device, non_blocking=True)
        masks = None if self.masks is None else self.masks.to(device, non_blocking=True)
        return Batch(images, self.labels.to(device, non_blocking=True), keys, self.damaged, masks)

    def split_masks(self, planes: int) -> Batch:
        """Takes the last `planes` channels of the images as masks."""
        if not planes:
            return self
        return replace(self, images=self.images[:, :-planes], masks=self.images[:, -planes:])

    def class_map(self) -> Tensor:
        """Returns the class of each pixel: int64 (B, H, W), -1 where it does not count.

        The planes of `masks` are the digits of class + 1 to the base 256, the lowest first; 0 does not count.
        """
        assert self.masks is not None
        planes = [plane.long() << 8 * place for place, plane in enumerate(self.masks.unbind(dim=1))]
        return torch.stack(planes).sum(dim=0) - 1
