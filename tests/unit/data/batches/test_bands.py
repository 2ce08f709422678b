"""Batches of bands: raw values, in their type, on every way that photographs take."""

import io
import tarfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from unit.data.band_files import chunky, npy, planes, tiff

from mae_vit.cli.main import main
from mae_vit.config.data import AugmentSection
from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import ViewKeys
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.batches.loader import FixedBatches
from mae_vit.data.images.augment import Augment, AugmentParams, center_crop, draw_erasing
from mae_vit.data.images.bands.resize import resize_bands
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.data.views import make_augment, normalization

CROP = {"crop": "random_resized", "scale": (0.3, 1.0), "ratio": (0.75, 1.33), "flip": True}


def noise(count, dtype, size=(20, 24), seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 200, (count, *size)).astype(dtype) + np.arange(count, dtype=dtype)[:, None, None]


def prepare(tmp_path, images, encode=npy, extension="npy", *options):
    (tmp_path / "src").mkdir()
    for n, image in enumerate(images):
        (tmp_path / "src" / f"{n}.{extension}").write_bytes(encode(image))
    assert main(["prepare", str(tmp_path / "src"), str(tmp_path / "out"), *options]) == 0
    return open_index(tmp_path / "out", "train")


def batches(index, name="tar", *, workers=0, **augment):
    options = {"img_size": (20, 24), **augment}
    source = open_source(
        index, name, channels=index.dataset.channels, augment=Augment(**options), memory_limit_gib=1
    )
    return torch.cat(
        [b.images for b in FixedBatches(source, np.arange(len(index)), seed=3, batch_size=4, workers=workers)]
    )


@pytest.mark.parametrize(
    ("encode", "extension", "dtype"),
    [
        (npy, "npy", "float16"),
        (planes, "tif", "uint16"),
        (chunky, "tif", "int16"),
        (tiff, "tif", "uint8"),
    ],
)
def test_values_survive(tmp_path, encode, extension, dtype):
    images = [noise(13, dtype, seed=n) for n in range(6)]
    index = prepare(tmp_path, images, encode, extension)
    order = index.keys()
    for name in ("tar", "memory"):
        found = batches(index, name)
        assert found.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(found.numpy(), np.stack([images[int(key)] for key in order]))


@pytest.mark.parametrize(
    ("dtype", "augment"),
    [("uint16", {**CROP, "erasing": 1.0}), ("float32", {"crop": "pad", "pad_px": 3, "flip": True})],
)
def test_memory_and_tar_and_workers_give_the_same(tmp_path, augment, dtype):
    index = prepare(tmp_path, [noise(5, dtype, seed=n) for n in range(9)], npy, "npy", "--nodata", "5")
    first = batches(index, **augment)
    for name, workers in (("memory", 0), ("tar", 1)):
        assert torch.equal(batches(index, name, workers=workers, **augment).float(), first.float())
    assert not torch.equal(first.float(), batches(index).float())


def test_crops_are_resized_as_photographs_are():
    """Of values that fit 8 bits, bands give what photographs give, to the rounding."""
    image = noise(3, "uint8")
    bands = Bands(("a", "b", "c"), "uint16", (0,) * 3, (65535,) * 3)
    boxes, flip = (2, 3, 11, 14), True
    plain = Augment(img_size=(16, 16)).crop_resize_flip(image, boxes, flip)
    deep = Augment(img_size=(16, 16), bands=bands).crop_resize_flip(image.astype(np.uint16), boxes, flip)
    assert deep.dtype == np.uint16
    assert np.abs(deep.astype(int).clip(0, 255) - plain).max() <= 1
    exact = F.interpolate(
        torch.from_numpy(image[:, 2:13, 3:17].astype(np.float64))[None],
        (16, 16),
        mode="bicubic",
        antialias=True,
    )
    np.testing.assert_array_equal(deep[..., ::-1], exact[0].numpy().round().clip(0, 65535))


def test_values_of_16_bits_are_not_cut_to_8():
    image = np.full((1, 8, 8), 513, np.uint16)
    image[0, :, 4:] = 514
    resized = resize_bands(image, (16, 16), None)
    assert set(np.unique(resized)) == {513, 514}
    assert resize_bands(np.full((1, 8, 8), -3, np.int16), (5, 5), None).tolist() == [[[-3] * 5] * 5]


@pytest.mark.parametrize("nodata", [-9999, None])
def test_missing_pixels_stay_missing_and_spread_nothing(nodata):
    rng = np.random.default_rng(0)
    dtype = "int16" if nodata is not None else "float32"
    image = rng.integers(990, 1010, (2, 24, 24)).astype(dtype)
    whole = resize_bands(image, (12, 12), nodata)
    gaps = image.copy()
    gaps[0, :8, :6] = np.nan if nodata is None else nodata
    found = resize_bands(gaps, (12, 12), nodata)
    missing = np.isnan(found) if nodata is None else found == nodata
    expected = np.zeros((2, 12, 12), bool)
    expected[0, :4, :3] = True
    np.testing.assert_array_equal(missing, expected)
    # -9999 would pull its neighbors down by hundreds.
    assert (found[~missing] >= 980).all()
    assert (found[~missing] <= 1020).all()
    far = np.s_[:, 8:, 8:]
    np.testing.assert_allclose(found[far], whole[far], atol=1e-3)
    np.testing.assert_allclose(found[1], whole[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint16", 0), ("uint8", 255), ("int16", -32768), ("uint16", 900), ("float16", 900)]
)
def test_resizing_makes_no_pixel_missing(dtype, nodata):
    """Bicubic interpolation overshoots at edges, up to the ends of the type, and may meet any value."""
    low, high = (0, 255) if dtype == "uint8" else (-32768, 900) if dtype == "int16" else (0, 1800)
    image = np.full((1, 24, 24), low + 1, dtype)
    image[:, :, 12:] = high - 1
    if dtype == "float16":
        image[:, ::2], image[:, 1::2] = nodata - 1, nodata + 1
    assert (resize_bands(image, (15, 33), None) == nodata).any()
    moved = resize_bands(image, (15, 33), nodata)
    assert not (moved == nodata).any()
    np.testing.assert_allclose(moved, resize_bands(image, (15, 33), None), rtol=0, atol=1)
    image[0, :6] = nodata
    found = resize_bands(image, (12, 12), nodata)[0] == nodata
    np.testing.assert_array_equal(found, np.repeat(np.arange(12)[:, None] < 3, 12, axis=1))


def test_what_lies_outside_is_missing_or_zero_of_the_scale():
    image = np.full((2, 3, 2, 2), 700, np.uint16)
    view = AugmentParams(np.zeros(2, bool), np.array([[-2, -2], [0, 0]]))
    scaled = Bands(("a", "b", "c"), "uint16", (100, 200, 300), (900,) * 3)
    missing = Bands(scaled.names, "uint16", scaled.low, scaled.high, 7)
    for bands, outside in ((scaled, (100, 200, 300)), (missing, (7, 7, 7))):
        shifted = Augment(img_size=(2, 2), crop="pad", pad_px=2, bands=bands).apply(image, view)
        assert shifted[0, :, 0, 0].tolist() == list(outside)
        assert (shifted[1] == 700).all()


def test_erasing_fills_within_the_scale():
    bands = Bands(("a", "b"), "int16", (-500, 1000), (-400, 3000))
    images = np.zeros((8, 2, 24, 24), np.int16)
    erasing = draw_erasing(1.0, (24, 24), ViewKeys(0, 0, np.arange(8)))
    erasing.fill(images, bands)
    for band, (low, high) in enumerate(((-500, -400), (1000, 3000))):
        filled = images[:, band][images[:, band] != 0]
        assert low <= filled.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < filled.max() <= high


@pytest.mark.parametrize("policy", ["color", "randaugment", "autoaugment_cifar"])
def test_policies_of_colors_are_refused_by_name(tmp_path, policy):
    index = prepare(tmp_path, [noise(4, "uint16")])
    augment = make_augment(AugmentSection(policy=policy), (20, 24), [0.5] * 4)
    with pytest.raises(InputError, match=rf'data.augment.policy="{policy}".*policy=none'):
        open_source(index, "tar", channels=4, augment=augment, memory_limit_gib=1)


def test_normalization_of_bands(tmp_path):
    index = prepare(tmp_path, [noise(4, "uint16")])
    dataset = read_dataset(tmp_path / "out")
    assert normalization("dataset", dataset, 4) == (tuple(dataset.mean), tuple(dataset.std))
    assert normalization("half", dataset, 4) == ((0.5,) * 4, (0.5,) * 4)
    given = [[0.1, 0.2, 0.3, 0.4], [1, 1, 1, 2]]
    assert normalization(given, dataset, 4) == (tuple(given[0]), tuple(given[1]))
    with pytest.raises(InputError, match=r'data.normalize="imagenet"'):
        normalization("imagenet", dataset, 4)
    with pytest.raises(InputError, match=r"model\.in_chans=3"):
        normalization("dataset", dataset, 3)
    images = batches(index)
    unit = dataset.bands.unit(images)
    np.testing.assert_allclose(unit.mean(dim=(0, 2, 3)), dataset.mean, rtol=1e-5)


def test_a_member_of_other_bands_is_damaged(tmp_path):
    index = prepare(tmp_path, [noise(4, "uint16", seed=n) for n in range(3)])
    shard = next((tmp_path / "out").glob("*.tar"))
    with tarfile.open(shard) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
        for n, (member, data) in enumerate(members):
            other = npy(noise(4, "int16", seed=n)) if n == 1 else data
            assert len(other) == len(data)
            tar.addfile(member, io.BytesIO(other))
    source = open_source(index, "tar", channels=4, augment=Augment(img_size=(20, 24)), memory_limit_gib=1)
    (batch,) = FixedBatches(source, np.arange(3), seed=0, batch_size=3, replace=True)
    assert [damage.reason.split(",")[0] for damage in batch.damaged] == ["4xint16"]
    assert torch.equal(batch.images[1].float(), batch.images[2].float())


def test_one_view_for_evaluation():
    bands = Bands(("a", "b"), "uint16", (0, 0), (1, 1), nodata=0)
    image = noise(2, "uint16") + np.uint16(300)
    found = center_crop(image, (10, 10), bands)
    np.testing.assert_array_equal(found, resize_bands(image[:, :, 2:22], (10, 10), 0))
