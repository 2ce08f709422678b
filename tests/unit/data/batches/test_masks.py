"""The loader gives masks with the crop and flip of their images."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from helpers.images import FIRST, STEP, prepare_pairs, write_pairs
from PIL import Image

from mae_vit.core.errors import DamagedSample, InputError
from mae_vit.data.batches.augmented import AugmentedSource, open_source
from mae_vit.data.batches.loader import FixedBatches, load_batches
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice
from mae_vit.data.shards.samples import find_masks

AUGMENT = Augment(img_size=(8, 8), crop="pad", pad_px=3, flip=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    out = folder / "out"
    prepare_pairs(write_pairs(folder / "in"), out, shard_samples=15)
    return out


def opened(folder, name="tar", masks=True, channels=1) -> AugmentedSource:
    index = open_index(folder, "train")
    return open_source(index, name, channels=channels, augment=AUGMENT, memory_limit_gib=1, masks=masks)


def expected_classes(images: torch.Tensor) -> torch.Tensor:
    """The class of each pixel by its gray value, -1 where it does not count."""
    gray = images[:, 0].long()
    return torch.where(gray < FIRST, -1, (gray - FIRST) // STEP)


@pytest.mark.parametrize(("name", "workers"), [("tar", 0), ("memory", 1)])
def test_batches_have_the_masks_of_their_views(pairs, name, workers):
    source = replace(opened(pairs, name), samples=np.arange(3, 37))
    order, share = GlobalOrder(34, 8, seed=1), RankSlice(0, 1, 2)
    batches = list(load_batches(source, order, share, start_step=0, stop_step=8, workers=workers))
    assert len(batches) == 16
    shifted = 0
    for batch in batches:
        assert batch.images.shape[1:] == (1, 8, 8)
        torch.testing.assert_close(batch.class_map(), expected_classes(batch.images))
        shifted += int((batch.images[:, 0, -1] == 0).all(dim=1).sum())
    assert shifted > 0


def test_images_are_those_without_masks(pairs):
    chosen = np.array([4, 4, 30, 7])
    plain, masked = (opened(pairs, masks=masks).render(5, 2, chosen, np.arange(4)) for masks in (False, True))
    np.testing.assert_array_equal(masked.images, plain.images)
    assert plain.masks is None
    # Two views of one image have two masks.
    classes = torch.from_numpy(masked.masks.astype(int)) - 1
    torch.testing.assert_close(classes, expected_classes(torch.from_numpy(masked.images)))
    assert not torch.equal(classes[0], classes[1])


def test_masks_of_more_than_255_classes(tmp_path):
    folder = write_pairs(tmp_path / "in", count=6)
    for path in (folder / "masks").rglob("*.png"):
        mask = np.array(Image.open(path)).astype(np.uint16)
        Image.fromarray(np.where(mask == 255, 9999, mask * 299).astype(np.uint16)).save(path)
    (folder / "classes.txt").write_text("".join(f"class {k}\n" for k in range(600)))
    prepare_pairs(folder, tmp_path / "out", ignore=9999)
    for batch in FixedBatches(opened(tmp_path / "out"), np.arange(6), seed=0, batch_size=6):
        small = expected_classes(batch.images)
        torch.testing.assert_close(batch.class_map(), torch.where(small < 0, -1, small * 299))
        assert batch.class_map().max() > 256


def test_a_damaged_mask_is_a_damaged_sample(pairs, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(pairs, out)
    index = open_index(out, "train")
    key = index.keys()[2]
    offset, _ = find_masks(out / "train-000000.tar")[key]
    data = bytearray((out / "train-000000.tar").read_bytes())
    data[offset + 45] ^= 0xFF
    (out / "train-000000.tar").write_bytes(data)
    with pytest.raises(DamagedSample, match="mask: "):
        list(FixedBatches(opened(out), np.arange(5), seed=0, batch_size=5))
    (batch,) = FixedBatches(opened(out), np.arange(5), seed=0, batch_size=5, replace=True)
    assert [damage.sample for damage in batch.damaged] == [2]
    torch.testing.assert_close(batch.class_map(), expected_classes(batch.images))


def test_data_without_masks_are_refused(digits):
    with pytest.raises(InputError, match="--masks"):
        opened(digits)


@pytest.mark.parametrize("bands", [1, 5])
def test_images_of_bands_have_masks(tmp_path, bands):
    folder = write_pairs(tmp_path / "in")
    for file in (folder / "images").rglob("*.png"):
        values = np.asarray(Image.open(file)).astype(np.uint16) * 257
        tifffile.imwrite(file.with_suffix(".tif"), np.stack([values] * bands), photometric="minisblack")
        file.unlink()
    prepare_pairs(folder, tmp_path / "out")
    source = opened(tmp_path / "out", channels=bands)
    batch = next(
        iter(load_batches(source, GlobalOrder(40, 8, seed=1), RankSlice(0, 1, 8), start_step=0, stop_step=1))
    )
    assert batch.images.shape[1:] == (bands, 8, 8)
    torch.testing.assert_close(batch.class_map(), expected_classes(batch.images.float() / 257))
