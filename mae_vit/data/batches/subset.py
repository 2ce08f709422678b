"""Draws labeled subsets and held-out shares of a split by hashes of the samples' keys.

As in `mae_vit.data.prepare.selection`, a draw depends only on the keys, and a smaller set is part of every larger one.
`prepare --limit-per-class N` takes the same samples as a subset of N here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mae_vit.core.keyed_rng import SUBSET_HASH, hash_key

# Never change this salt: it decides which images are held out, and so what a result means.
# It differs from the salt of `prepare --holdout`, which removes its samples from the train split.
_HOLDOUT_HASH = b"mae-vit finetune holdout"


def limit_per_class(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], limit: int, *, draw: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits samples into a subset of at most `limit` of each class and the rest.

    Args:
        samples: int64 (n,), sample numbers in the split, ascending.
        labels: int (N,), labels of the whole split.
        keys: N sample keys of the whole split.
        limit: most samples of a class. A smaller limit takes a part of what a larger one takes.
        draw: number of the draw; 0 is the draw of `prepare --limit-per-class`.
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
    salt, taken = salt + (f" {draw}".encode() if draw else b""), list[int]()
    for label in np.unique(labels[samples]):
        members = [int(sample) for sample in samples[labels[samples] == label]]
        ranked = sorted(members, key=lambda sample: (hash_key(keys[sample], salt), keys[sample]))
        taken += ranked[: quota(len(members))]
    chosen = np.sort(np.array(taken, np.int64))
    return chosen, samples[~np.isin(samples, chosen)]
