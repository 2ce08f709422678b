"""Draws parts of a split, labeled subsets and held-out shares, by hashes of the samples' keys.

The rule is that of `mae_vit.data.prepare.selection`: a draw depends only on the keys, and a smaller
set is part of every larger one. `prepare --limit-per-class N` and a subset of N here take the
same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mae_vit.core.keyed_rng import SUBSET_HASH, hash_key
from mae_vit.data.batches.sources import Source

# Never change this salt: it decides which images are held out, and with that what a result means.
# It differs from the salt of `prepare --holdout`, which removes its samples from the train split.
_HOLDOUT_HASH = b"mae-vit finetune holdout"


class SubsetSource:
    """Some samples of a source. Place i here is place `samples[i]` there.

    The key of a view is the sample's number in the whole split, so an image gets the same crop in
    every subset.

    Attributes:
        source: the whole source.
        samples: int64 (n,), places in `source`.
    """

    def __init__(self, source: Source, samples: np.ndarray) -> None:
        """Selects the samples at these places."""
        self.source, self.samples = source, samples

    @property
    def labels(self) -> np.ndarray:
        """Int (n,)."""
        return np.asarray(self.source.labels)[self.samples]

    def labels_of(self, index: np.ndarray) -> np.ndarray:
        """Int (B,), the labels of the samples at places `index` (B,)."""
        return self.source.labels_of(self.samples[index])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an augmented image."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of an augmented image's values."""
        return self.source.dtype

    @property
    def mask_planes(self) -> int:
        """How many of the channels, the last ones, are a mask (`mae_vit.data.batches.masks`)."""
        return self.source.mask_planes

    @property
    def in_memory(self) -> bool:
        """Whether images are read from memory; reading a sample then opens no shard."""
        return self.source.in_memory

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Int64 (B,), the numbers in the split of the samples at `places` (B,)."""
        return self.source.numbers(self.samples[places])

    def images(
        self,
        seed: int,
        epoch: int,
        samples: np.ndarray,
        views: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes augmented images of the samples at places `samples` (B,): (B, C, H, W)."""
        numbers = self.samples[samples]
        return self.source.images(seed, epoch, numbers, numbers if views is None else views, out)


def limit_per_class(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], limit: int, *, draw: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits samples into those taken, at most `limit` of each class, and the rest.

    Args:
        samples: int64 (n,), sample numbers in the split, ascending.
        labels: int (N,), labels of the whole split.
        keys: N sample keys of the whole split.
        limit: largest number of each class. A smaller limit takes part of what a larger one takes.
        draw: number of the draw; 0 is the draw of `prepare --limit-per-class`.
    """
    return _split_by_hash(samples, labels, keys, lambda count: limit, _salt(SUBSET_HASH, draw))


def draw_held_out(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], share: float, *, draw: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits samples into a held-out share of each class (0 to 1) and the rest.

    A class of two or more samples gives at least one and keeps at least one. `draw`: number of the draw.
    """

    def quota(count: int) -> int:
        return min(max(1, int(share * count + 0.5)), count - 1)

    return _split_by_hash(samples, labels, keys, quota, _salt(_HOLDOUT_HASH, draw))


def _salt(salt: bytes, draw: int) -> bytes:
    return salt + (f" {draw}".encode() if draw else b"")


def _split_by_hash(
    samples: np.ndarray,
    labels: np.ndarray,
    keys: Sequence[str],
    quota: Callable[[int], int],
    salt: bytes,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `quota(class size)` samples of the smallest hashes in each class, and the rest, both ascending."""
    taken = []
    for label in np.unique(labels[samples]):
        members = [int(sample) for sample in samples[labels[samples] == label]]
        ranked = sorted(members, key=lambda sample: (hash_key(keys[sample], salt), keys[sample]))
        taken += ranked[: quota(len(members))]
    chosen = np.sort(np.array(taken, np.int64))
    return chosen, samples[~np.isin(samples, chosen)]
