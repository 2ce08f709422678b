"""Mixup and cutmix over neighbors of the global order: the same pairs whoever computes them.

Images 2j and 2j + 1 of an epoch's order make a pair; what is drawn for it is keyed by its
first sample. timm, whose recipe this is, pairs whatever lies in a micro-batch and draws
from a global generator, so its result depends on the split over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import RngStream
from mae_vit.objectives.objective import Grouping

# Rows 2j and 2j + 1 of the global order, of two images.
PAIRS = Grouping(unit=2, views=1, why="mixup and cutmix pair neighbors")
# Quantiles of each Beta distribution that are told apart: one for each 16-bit number.
_QUANTILES = 1 << 16


class Mixing(nn.Module):
    """Blends the two images of a pair, or pastes a box of each into the other; labels alike.

    Mixup (arXiv 1710.09412): share lambda of one and 1 - lambda of the other, lambda from
    Beta(alpha, alpha). Cutmix (arXiv 1905.04899): a box of (1 - lambda) of the area, cut off at the
    edges; labels by the area that is left. With both, each pair draws one of them, half of the
    time each (timm's defaults, as in MAE's fine-tuning, Sec. A.1; there a batch draws once).

    Everything drawn is looked up or computed in whole numbers, so that it is alike on all
    devices: logarithms and roots, which are not, go into tables made on the CPU.
    """

    blends: Tensor
    cuts: Tensor

    def __init__(self, *, mixup: float, cutmix: float) -> None:
        """Makes the tables.

        Args:
            mixup: alpha of mixup; 0 for none of it.
            cutmix: alpha of cutmix; 0 for none of it.

        Raises:
            ValueError: if both are 0.
        """
        super().__init__()
        if not (mixup or cutmix):
            raise ValueError("nothing to mix by: mixup and cutmix are 0")
        self.mixup, self.cutmix = mixup, cutmix
        # Constants: no part of a model's state.
        self.register_buffer("blends", _quantiles(mixup), persistent=False)
        # Side of the box over that of the image.
        self.register_buffer("cuts", (1 - _quantiles(cutmix)).sqrt(), persistent=False)

    def forward(self, batch: Batch, num_classes: int) -> tuple[Tensor, Tensor]:
        """Mixes a micro-batch of whole pairs.

        Args:
            batch: B images, B even; labels of all of them.
            num_classes: K.

        Returns:
            Images, float32 (B, C, H, W) in 0..255, and labels, float32 (B, K) of sum 1.

        Raises:
            ValueError: if a pair lacks its second image.
        """
        size = len(batch.images)
        if size % 2:
            raise ValueError(
                f"mixup and cutmix pair neighbors: a micro-batch of {size} images leaves one over"
            )
        kept, share = self._draw(batch)
        images = batch.images.float().unflatten(0, (-1, 2))
        labels = F.one_hot(batch.labels, num_classes).float().unflatten(0, (-1, 2))
        kept, share = kept[:, None, None], share[:, None, None]
        return (
            (images * kept + images.flip(1) * (1 - kept)).flatten(0, 1),
            (labels * share + labels.flip(1) * (1 - share)).flatten(0, 1),
        )

    def _draw(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns, for P pairs, how much of an image is kept: at each place (P, H, W), and in all (P,)."""
        height, width = batch.images.shape[-2:]
        keys = batch.keys
        drawn = replace(keys, index=keys.index[::2]).random_uint32(RngStream.MIX, 4)
        quantile = drawn[:, 1] >> 16
        blend = self.blends[quantile]
        if not self.cutmix:
            return blend[:, None, None].expand(-1, height, width), blend
        inside, area = self._boxes(self.cuts[quantile], drawn[:, 2:], height, width)
        left = 1 - area.float() / (height * width)
        if not self.mixup:
            return (~inside).float(), left
        blending = (drawn[:, 0] & 1).bool()
        return (
            torch.where(blending[:, None, None], blend[:, None, None], (~inside).float()),
            torch.where(blending, blend, left),
        )

    @staticmethod
    def _boxes(cut: Tensor, drawn: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Boxes around uniform centers, cut off at the edges: inside (P, H, W), and pixels (P,)."""
        sides = []
        for axis, side in enumerate((height, width)):
            length = (cut * side).long()
            center = (drawn[:, axis] * side) >> 32
            places = torch.arange(side, device=drawn.device)
            sides.append(
                (places >= (center - length // 2)[:, None]) & (places < (center + (length + 1) // 2)[:, None])
            )
        rows, columns = sides
        return rows[:, :, None] & columns[:, None, :], rows.sum(dim=1) * columns.sum(dim=1)


def _quantiles(alpha: float) -> Tensor:
    """Quantiles of Beta(alpha, alpha), float32; ones for alpha 0, which is not drawn from."""
    if not alpha:
        return torch.ones(_QUANTILES)
    with torch.device("cpu"):
        # Also where a model's costs are estimated without computing anything.
        chances = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    return torch.from_numpy(betaincinv(alpha, alpha, chances.numpy())).float()
