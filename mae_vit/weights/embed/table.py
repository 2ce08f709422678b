"""All parts as one table: what is written to the output, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mae_vit.runtime.signals import StopRequest
from mae_vit.weights.embed.images import Images
from mae_vit.weights.embed.parts import Parts

_CHUNK_BYTES = 32 << 20


class Stopped(Exception):
    """A signal came; what is half-written is to be given up."""


class Table:
    """Rows of features with their keys, labels and splits, in the order of the images.

    Attributes:
        facts: of the encoder and the data, for the output.
        rows: how many.
        width: D.
        dtype: of the features.
        classes: names of the labels; empty where there are no labels.
        splits: their names; empty where there are none.
        broken: number and reason of each image that is in no row.
        chunk_rows: rows of all chunks but the last.
    """

    def __init__(
        self,
        parts: Parts,
        images: Images,
        facts: dict[str, Any],
        *,
        width: int,
        stop: StopRequest | None = None,
    ) -> None:
        """Reads which images the parts hold.

        Args:
            parts: of all images.
            images: their source.
            facts: see `mae_vit.weights.embed.identity`.
            width: D.
            stop: asked before each chunk.

        Raises:
            InputError: if a part is damaged.
        """
        self._parts, self._images, self._stop = parts, images, stop
        whole: list[np.ndarray] = []
        self.broken: list[tuple[int, str]] = []
        for numbers, broken, reasons in parts.read("images", "broken_images", "broken_reasons"):
            whole.append(numbers)
            self.broken += zip(broken.tolist(), reasons.tolist(), strict=True)
        self._whole = np.concatenate(whole) if whole else np.zeros(0, np.int64)
        labels = images.labels
        self._labels = np.maximum(labels, -1) if (labels >= 0).any() else None
        self.rows, self.width, self.dtype = len(self._whole), width, np.dtype(facts["dtype"])
        self.classes, self.splits = images.classes if self._labels is not None else (), images.splits
        self.facts = {**facts, "rows": self.rows, "broken": len(self.broken), "classes": list(self.classes)}
        self.chunk_rows = max(1, _CHUNK_BYTES // (width * self.dtype.itemsize))

    @property
    def has_labels(self) -> bool:
        """Whether any image has one."""
        return self._labels is not None

    def feature_chunks(self) -> Iterator[np.ndarray]:
        """Yields (chunk_rows, D), whatever the parts are cut into.

        Raises:
            InputError: if a part is damaged.
            Stopped: if a signal came.
        """
        waiting: list[np.ndarray] = []
        for (features,) in self._parts.read("features"):
            if self._stop:
                raise Stopped
            waiting.append(features)
            if sum(map(len, waiting)) < self.chunk_rows:
                continue
            joined = np.concatenate(waiting)
            full = len(joined) // self.chunk_rows * self.chunk_rows
            for at in range(0, full, self.chunk_rows):
                yield joined[at : at + self.chunk_rows]
            waiting = [joined[full:]]
        rest = np.concatenate(waiting) if waiting else np.zeros((0, self.width), self.dtype)
        if len(rest):
            yield rest

    def key_chunks(self) -> Iterator[np.ndarray]:
        """Yields the keys of chunk_rows rows, as fixed-width Unicode."""
        for numbers in self._chunks():
            yield np.array(self._images.keys(numbers), np.str_)

    def label_chunks(self) -> Iterator[np.ndarray]:
        """Yields the labels of chunk_rows rows: int32, places in `classes`, -1 where there is none."""
        assert self._labels is not None
        for numbers in self._chunks():
            yield self._labels[numbers]

    def split_chunks(self) -> Iterator[np.ndarray]:
        """Yields the splits of chunk_rows rows, as fixed-width Unicode."""
        names = np.array(self.splits, np.str_)
        for numbers in self._chunks():
            yield names[self._images.split_numbers(numbers)]

    def _chunks(self) -> Iterator[np.ndarray]:
        for at in range(0, self.rows, self.chunk_rows):
            if self._stop:
                raise Stopped
            yield self._whole[at : at + self.chunk_rows]
