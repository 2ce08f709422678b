"""Statistics of a split's images, collected image by image."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mae_vit.data.prepare.convert import Converted
from mae_vit.data.shards.dataset_json import Processing, Shard, Split


@dataclass
class Statistics:
    """Sums over the images of a split; exact integers, so that their order does not matter."""

    images: int = 0
    pixels: int = 0
    total: list[int] = field(default_factory=lambda: [0, 0, 0])
    squares: list[int] = field(default_factory=lambda: [0, 0, 0])
    all_gray: bool = True
    heights: tuple[int, int] = (2**63, 0)
    widths: tuple[int, int] = (2**63, 0)
    formats: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, image: Converted, label: int | None) -> None:
        """Adds an image."""
        self.images += 1
        self.pixels += image.height * image.width
        self.total = [a + b for a, b in zip(self.total, image.total, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, image.squares, strict=True)]
        self.all_gray &= image.gray
        self.heights = min(self.heights[0], image.height), max(self.heights[1], image.height)
        self.widths = min(self.widths[0], image.width), max(self.widths[1], image.width)
        self.formats[image.extension] += 1
        self.notes.update(image.notes)
        if label is not None:
            self.labels[label] += 1

    def mean_std(self) -> tuple[list[float], list[float]]:
        """Returns mean and standard deviation of pixels in 0..1, one value if all images are gray."""
        mean = np.array([total / self.pixels for total in self.total]) / 255
        variance = np.maximum(np.array([s / self.pixels for s in self.squares]) / 255**2 - mean**2, 0)
        channels = 1 if self.all_gray else 3
        return [round(float(v), 6) for v in mean[:channels]], [
            round(float(v), 6) for v in variance[:channels] ** 0.5
        ]

    def describe(
        self, shards: list[Shard], *, source: str, classes: int, processing: Processing | None = None
    ) -> Split:
        """The split's entry in `dataset.json`."""
        return Split(
            samples=self.images,
            shards=shards,
            source=source,
            height=self.heights,
            width=self.widths,
            formats=dict(sorted(self.formats.items())),
            class_counts=[self.labels[number] for number in range(classes)],
            processing=processing or Processing(),
        )
