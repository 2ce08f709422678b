"""Replaces damaged samples by intact ones, the same on every rank and worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mae_vit.core.errors import Damage, DamagedSample
from mae_vit.data.batches.augmented import AugmentedSource, Views
from mae_vit.data.order.order import view_keys


class WholeSamples:
    """Renders samples of a source; a later sample replaces one that is damaged.

    The candidates for sample i are i + 1, i + 3, i + 7, ... (modulo N). The first intact one is taken.
    The steps double, so 14 candidates suffice to leave a lost shard of 10,000 samples.
    The choice depends only on what is damaged, not on rank, worker or epoch.
    """

    def __init__(self, source: AugmentedSource, repeats: int = 1) -> None:
        """Starts without known damage.

        Args:
            source: renders samples.
            repeats: how often in a row each place occurs.
        """
        self._source, self._repeats, self._folder = source, repeats, Path()
        # Later epochs do not try to decode a damaged sample again.
        self._known: dict[int, Damage] = {}

    def read(
        self, seed: int, epoch: int, index: np.ndarray, out: Views | None = None
    ) -> tuple[Views, tuple[Damage, ...]]:
        """Renders the places `index` (B,), into `out` if it is given.

        Returns:
            The views, and all damaged samples that were replaced.

        Raises:
            DamagedSample: if all candidates for a place are damaged.
        """
        while True:
            places, passed, stuck = self._skip_damaged(index)
            if stuck:
                raise DamagedSample(stuck, self._folder)
            try:
                keys = view_keys(self._source.numbers(places), self._repeats)
                return self._source.render(seed, epoch, places, keys, out), tuple(passed.values())
            except DamagedSample as error:
                self._known |= {int(places[position]): damage for position, damage in error.damaged}
                self._folder = error.folder

    def _skip_damaged(
        self, index: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Damage], list[tuple[int, Damage]]]:
        """Returns the places to read, the damaged samples passed over, and the places without an intact candidate."""
        count, places = len(self._source), index.copy()
        passed, stuck = dict[int, Damage](), list[tuple[int, Damage]]()
        for position, place in enumerate(index.tolist()):
            for candidate in replacement_candidates(place, count):
                if candidate not in self._known:
                    places[position] = candidate
                    break
                passed[candidate] = self._known[candidate]
            else:
                stuck.append((position, self._known[place]))
        return places, passed, stuck


def replacement_candidates(place: int, samples: int) -> Iterator[int]:
    """Yields `place` itself, then the places that may replace it, all in 0..samples-1."""
    for power in range(samples.bit_length() + 1):
        yield (place + (1 << power) - 1) % samples
