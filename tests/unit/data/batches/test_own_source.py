"""A map-style data set of one's own: what it gives is cropped, keyed and replaced as shards are."""

from pathlib import Path

import numpy as np

from mae_vit.core.errors import Damage, DamagedSample
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.batches.sources import Sample
from mae_vit.data.images.augment import Augment
from mae_vit.data.order.order import GlobalOrder, RankSlice

DAMAGED = 3


class Squares:
    """Gray images of any size: the first half of the rows has class 0, the rest class 1."""

    channels, dtype, has_masks = 1, np.dtype(np.uint8), True
    labels = np.arange(20) % 5

    def read(self, sample: int) -> Sample:
        if sample == DAMAGED:
            raise DamagedSample([(0, Damage(sample, "squares", None, None, "lost"))], Path("squares"))
        pixels = np.full((1, 8 + sample, 9), 200, np.uint8)
        pixels[:, : pixels.shape[1] // 2] = 100
        return Sample(pixels, int(self.labels[sample]), (pixels[0] // 100).astype(np.uint16))


def test_a_source_needs_labels_and_read_alone():
    source = AugmentedSource(Squares(), Augment(img_size=(8, 8), flip=True))
    batches = list(load_batches(source, GlobalOrder(20, 5, seed=0), RankSlice(), start_step=0, stop_step=4))
    samples = np.concatenate([batch.keys.index for batch in batches])
    assert sorted(samples) == list(range(20))
    taken = np.where(samples == DAMAGED, DAMAGED + 1, samples)
    np.testing.assert_array_equal(np.concatenate([batch.labels for batch in batches]), taken % 5)
    assert [damage.reason for batch in batches for damage in batch.damaged] == ["lost"]
    for batch in batches:
        assert batch.images.shape == (5, 1, 8, 8)
        for row, below in ((0, 0), (7, 1)):
            assert (batch.class_map()[:, row] == below).all()
            assert ((batch.images[:, 0, row] > 150) == below).all()
