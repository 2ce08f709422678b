"""Statistics of a split's images, collected image by image."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.data.prepare.bands import EIGHT_BIT, BandLayout, BandStatistics, band_notes, describe_bands
from mae_vit.data.prepare.convert import Converted
from mae_vit.data.shards.dataset_json import BandTable, Masks, Processing, Shard, Split


@dataclass
class Statistics:
    """Sums over the images of a split; exact integers, so that their order does not matter.

    `kind` and `layout` are those of all images: None before the first, and a layout also for photographs.
    """

    scale: str | tuple[float, float] | None = None
    kind: str | None = None
    layout: BandLayout | None = None
    bands: BandStatistics | None = None
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
    mask_pixels: np.ndarray | None = None

    def expect(self, layout: BandLayout | None) -> None:
        """Sets the bands that all images must have; None for 8-bit photographs."""
        self.kind, self.layout = EIGHT_BIT if layout is None else layout.kind, layout

    def add(self, image: Converted, label: int | None, path: str) -> None:
        """Adds an image; raises InputError if its bands or type differ from those of earlier images."""
        self._check_kind(image, path)
        for layout, sums in image.sums:
            if self.layout is not None and self.layout.fits(layout):
                if self.bands is None:
                    self.bands = BandStatistics(sums.count, sums.dtype, sums.nodata)
                self.bands.merge(sums)
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

    def _check_kind(self, image: Converted, path: str) -> None:
        if self.kind is None:
            self.kind, self.layout = image.kind, image.layout
        theirs, ours = image.layout, self.layout
        if image.kind != self.kind:
            how = "or --bands 1 keeps the first band or page of each"
            if EIGHT_BIT in (image.kind, self.kind):
                how = "8-bit also keeps gray and RGB images of 16 bits, reduced to 8 bits"
            raise InputError(
                f"files differ in bands or type: {path} is {image.kind}, others are {self.kind}. In mae-vit prepare, "
                f"--take {self.kind} or --take {image.kind} keeps one kind and leaves out the others; {how}"
            )
        if theirs is None or ours is None:
            return
        if not ours.fits(theirs):
            raise InputError(
                f"files differ: {path} has the bands {', '.join(theirs.names)} and no-data {theirs.nodata}, others "
                f"{', '.join(ours.names)} and {ours.nodata}; give --bands NAME,NAME,... or --nodata"
            )
        if theirs.named and not ours.named:
            self.layout = theirs

    def describe_bands(self) -> tuple[BandTable | None, list[float], list[float]]:
        """Returns the section "bands" (None for photographs), and mean and std by channel."""
        if self.layout is not None and self.bands is not None:
            return describe_bands(self.layout, self.bands, self.scale)
        mean = np.array([total / self.pixels for total in self.total]) / 255
        variance = np.maximum(np.array([s / self.pixels for s in self.squares]) / 255**2 - mean**2, 0)
        # One value if all images are gray.
        channels = 1 if self.all_gray else 3
        return (
            None,
            [round(float(v), 6) for v in mean[:channels]],
            [round(float(v), 6) for v in variance[:channels] ** 0.5],
        )

    def remarks(self) -> list[str]:
        """Returns notes on the values of bands."""
        table = self.describe_bands()[0]
        return [] if table is None or self.bands is None else band_notes(table, self.bands)

    def add_mask(self, pixels: np.ndarray) -> None:
        """Adds a mask's pixel counts int64 (1 + K,): ignored pixels, then those of each class."""
        self.mask_pixels = pixels if self.mask_pixels is None else self.mask_pixels + pixels

    def describe(
        self, shards: list[Shard], *, source: str, classes: int, processing: Processing | None = None
    ) -> Split:
        """Builds the split's entry in `dataset.json`."""
        masks = None
        if (pixels := self.mask_pixels) is not None:
            counted = max(1, int(pixels[1:].sum()))
            shares = [round(float(count) / counted, 6) for count in pixels[1:]]
            masks = Masks(shares=shares, ignored=round(float(pixels[0] / pixels.sum()), 6))
        return Split(
            samples=self.images,
            shards=shards,
            source=plain_text(source),
            height=self.heights,
            width=self.widths,
            formats=dict(sorted(self.formats.items())),
            class_counts=[self.labels[number] for number in range(classes)],
            processing=processing or Processing(),
            masks=masks,
        )
