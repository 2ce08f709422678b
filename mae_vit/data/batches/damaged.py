"""Whole samples in the places of damaged ones: the same whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mae_vit.core.errors import Damage, DamagedSample
from mae_vit.data.batches.sources import Source


class Replacing:
    """Images and labels of a source; where a sample is damaged, those of one behind it.

    The place i goes to i + 1, i + 3, i + 7, ... (modulo N), whichever is whole first: near
    first, and out of a lost shard of 10,000 samples by the 14th. That depends on what is
    damaged alone, not on rank, worker or epoch.
    """

    def __init__(self, source: Source, *, repeats: int = 1) -> None:
        """Knows of no damage yet; of places each comes `repeats` times in a row."""
        self._source, self._samples, self._repeats = source, len(source.labels), repeats
        self._folder = Path()
        # What was found is not decoded again in later epochs.
        self._known: dict[int, Damage] = {}

    def read(
        self, seed: int, epoch: int, index: np.ndarray, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, tuple[Damage, ...]]:
        """Reads augmented images of the places `index` (B,), into `out` if that is given.

        Returns:
            Images uint8 (B, C, H, W), labels (B,), and all damaged samples that were passed.

        Raises:
            DamagedSample: if nothing whole is found for a place.
        """
        while True:
            places, passed, stuck = self._skip_damaged(index)
            if stuck:
                raise DamagedSample(stuck, self._folder)
            try:
                images = self._source.images(seed, epoch, places, out, repeats=self._repeats)
                return images, self._source.labels_of(places), tuple(passed.values())
            except DamagedSample as error:
                self._known |= {int(places[position]): damage for position, damage in error.found}
                self._folder = error.folder

    def _skip_damaged(
        self, index: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Damage], list[tuple[int, Damage]]]:
        """The places to read, as far as is known; the damaged ones passed; those that lead nowhere."""
        places, passed, stuck = index.copy(), dict[int, Damage](), list[tuple[int, Damage]]()
        for position, place in enumerate(index.tolist()):
            for candidate in replacement_candidates(place, self._samples):
                if candidate not in self._known:
                    places[position] = candidate
                    break
                passed[candidate] = self._known[candidate]
            else:
                stuck.append((position, self._known[place]))
        return places, passed, stuck


def replacement_candidates(place: int, samples: int) -> Iterator[int]:
    """Yields the places that stand in for each other, the own one first, of 0..samples-1."""
    for power in range(samples.bit_length() + 1):
        yield (place + (1 << power) - 1) % samples
