"""An augmentation policy of one's own: inverts the bright pixels of every fifth image (BYOL, arXiv 2006.07733, App. B).

mae-vit pretrain mae_digits 'run.plugins=[examples/solarize.py]' data.augment.policy=solarize run.name=solarize
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mae_vit.config.data import register_policy
from mae_vit.core.keyed_rng import RngStream, ViewKeys


@dataclass(frozen=True)
class Solarize:
    """Inverts pixels from `threshold` on.

    Attributes:
        threshold: smallest value that is inverted.
        probability: probability that an image is changed.
    """

    name: ClassVar[str] = "solarize"
    threshold: int = 128
    probability: float = 0.2

    def draw(self, keys: ViewKeys) -> list[bool]:
        """Draws which views are changed, by their keys alone."""
        return (keys.uniform(RngStream.POLICY, 1)[:, 0] < self.probability).tolist()

    def apply(self, image: np.ndarray, calls: bool, fill: tuple[int, ...] | None) -> np.ndarray:
        """Changes an image uint8 (C, H, W)."""
        return np.where(image < self.threshold, image, 255 - image)


register_policy(Solarize)
