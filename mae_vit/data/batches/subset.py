"""Draws labeled subsets and held-out shares of a split by hashes of the samples' keys.

A draw depends only on the keys, and a smaller set is part of every larger one. `prepare --limit-per-class N` takes the
same samples as a subset of N here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mae_vit.core.keyed_rng import SUBSET_HASH, hash_key

# Never change this salt: it decides which images are held out, and so what a result means.
# It differs from the salt of `prepare --holdout`, which removes its samples from the train split.
_HOLDOUT_HASH = b"mae-vit finetune holdout"


def limit_per_class(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], limit: int, *, draw: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits `samples`, ascending sample numbers, into a subset of at most `limit` of each class and the rest.

    Labels (N,) and keys are those of the whole split. A smaller limit takes a part of what a larger one
    takes; draw 0 is that of `prepare --limit-per-class`.
    """
    return _split_by_hash(samples, labels, keys, lambda count: limit, SUBSET_HASH, draw)


def draw_held_out(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], share: float, *, draw: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits samples into a held-out share of each class (0 to 1) and the rest.

    A class of two or more samples gives at least one and keeps at least one. `draw`: number of the draw.
    """

    def quota(count: int) -> int:
        return min(max(1, int(share * count + 0.5)), count - 1)

    return _split_by_hash(samples, labels, keys, quota, _HOLDOUT_HASH, draw)


def _split_by_hash(
    samples: np.ndarray,
    labels: np.ndarray,
    keys: Sequence[str],
    quota: Callable[[int], int],
    salt: bytes,
    draw: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `quota(class size)` samples with the smallest hashes of each class, and the rest, both ascending."""
    salt += f" {draw}".encode() if draw else b""
    taken = first_by_hash([keys[n] for n in samples.tolist()], labels[samples].tolist(), quota, salt)
    chosen = np.isin(np.arange(len(samples)), taken)
    return samples[chosen], samples[~chosen]


def first_by_hash(
    keys: Sequence[str], classes: Sequence[Hashable], quota: Callable[[int], int], salt: bytes
) -> list[int]:
    """Returns the places of the `quota(class size)` keys with the smallest hashes of each class, ascending."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for place, name in enumerate(classes):
        members[name].append(place)
    taken = list[int]()
    for places in members.values():
        ranked = sorted(places, key=lambda place: (hash_key(keys[place], salt), keys[place]))
        taken += ranked[: quota(len(places))]
    return sorted(taken)
