"""Parts of a split: labeled subsets and held-out shares, by hashes of the samples' keys.

The rule is `mae_vit.data.prepare.selection`'s: a draw depends on the key alone, and sets of
different sizes are nested. `prepare --limit-per-class N` and a subset of N here take the
same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mae_vit.core.keyed_rng import SUBSET_HASH, hash_key
from mae_vit.data.batches.sources import Source

# Part of the results' meaning: never change it. Not that of `prepare --holdout`, whose
# samples are gone from train.
_HOLDOUT_HASH = b"mae-vit finetune holdout"


class SubsetSource:
    """Some samples of a source, by their place among them.

    Views are drawn for the sample's number in the split: an image is cropped alike in
    whatever subset it is.

    Attributes:
        source: that they are of.
        samples: their numbers in it.
    """

    def __init__(self, source: Source, samples: np.ndarray) -> None:
        """Takes the samples of these numbers."""
        self.source, self.samples = source, samples

    @property
    def labels(self) -> np.ndarray:
        """Int (n,)."""
        return np.asarray(self.source.labels)[self.samples]

    def labels_of(self, index: np.ndarray) -> np.ndarray:
        """Int (B,), the labels of the samples at these places (B,)."""
        return self.source.labels_of(self.samples[index])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the augmented images."""
        return self.source.shape

    @property
    def in_memory(self) -> bool:
        """Whether reading a sample opens no shard."""
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
        """Computes augmented images of the samples at places `samples` of the subset: uint8 (B, C, H, W)."""
        numbers = self.samples[samples]
        return self.source.images(seed, epoch, numbers, numbers if views is None else views, out)


def limit_per_class(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits samples in those taken, at most `limit` of each class, and the rest.

    Args:
        samples: sorted numbers of samples.
        labels: (N,) of the whole split.
        keys: of the whole split.
        limit: largest number for each class; smaller sets are inside larger ones.
    """
    return _split_by_hash(samples, labels, keys, lambda count: limit, SUBSET_HASH)


def draw_held_out(
    samples: np.ndarray, labels: np.ndarray, keys: Sequence[str], share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Splits samples in a held-out share of each class and those left.

    A class of two or more gives at least one and keeps at least one.
    """

    def quota(count: int) -> int:
        return min(max(1, int(share * count + 0.5)), count - 1)

    return _split_by_hash(samples, labels, keys, quota, _HOLDOUT_HASH)


def _split_by_hash(
    samples: np.ndarray,
    labels: np.ndarray,
    keys: Sequence[str],
    quota: Callable[[int], int],
    salt: bytes,
) -> tuple[np.ndarray, np.ndarray]:
    """(Those of the smallest hashes, by class; the others), each sorted."""
    taken = []
    for label in np.unique(labels[samples]):
        members = [int(sample) for sample in samples[labels[samples] == label]]
        ranked = sorted(members, key=lambda sample: (hash_key(keys[sample], salt), keys[sample]))
        taken += ranked[: quota(len(members))]
    chosen = np.sort(np.array(taken, np.int64))
    return chosen, samples[~np.isin(samples, chosen)]
