"""`mae-vit prepare --masks`: pairs, what is checked of them, and what is printed."""

import io

import numpy as np
import pytest
from helpers.images import encoded, picture, write_files, write_pairs
from PIL import ExifTags, Image, ImageOps
from unit.data.band_files import npy


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs", count=6)


@pytest.fixture
def masked(call, pairs):
    def run(options="", folder=pairs, **more):
        files = f"--masks {folder}/masks --mask-classes {folder}/classes.txt"
        return call(folder / "images", options=f"{files} {options}", **more)

    return run


def png(data):
    return np.array(Image.open(io.BytesIO(data)))


def test_masks_lie_beside_their_images(pairs, tmp_path, call, masked):
    result = masked()
    segmentation = result.dataset.segmentation
    assert (segmentation.classes, segmentation.ids, segmentation.ignore) == (
        *(["ground", "thing 1", "thing 2"], [0, 1, 2]), 255,
    )  # fmt: skip
    for split in ("train", "test"):
        masks = [np.array(Image.open(path)) for path in (pairs / "masks" / split).iterdir()]
        counted = np.bincount(np.concatenate([mask.ravel() for mask in masks]), minlength=256)
        shares = result.dataset.splits[split].masks
        assert shares.shares == pytest.approx(counted[:3] / counted[:3].sum(), abs=1e-6)
        assert shares.ignored == pytest.approx(2 / 64, abs=1e-6)
        for number, sample in result.images(split).items():
            assert sample["seg.png"] == (pairs / "masks" / split / f"{number}.png").read_bytes()
    again = call(result.out, out="again")
    assert (again.dataset.segmentation, again.images()) == (segmentation, result.images())
    assert again.dataset.splits["test"].masks == result.dataset.splits["test"].masks
    more = masked(folder=write_pairs(tmp_path / "more", splits=("val",), classes=4))
    assert more.code == 2
    assert "masks of 3" in more.text


def test_images_without_a_mask_and_masks_without_an_image(pairs, masked, said):
    for path in ("masks/train/3.png", "masks/train/5.png", "images/test/2.png"):
        (pairs / path).unlink()
    refused = masked()
    said(refused.text)
    assert (refused.code, refused.out.exists()) == (2, False)
    result = masked("--masked-only")
    said(result.text)
    assert {name: split.samples for name, split in result.dataset.splits.items()} == {"train": 4, "test": 5}


@pytest.mark.parametrize("name", ["{}.jpg", "{}_mask.png"])
def test_masks_of_other_names_are_named(pairs, masked, name):
    for mask in list((pairs / "masks").rglob("*.png")):
        mask.rename(mask.with_name(name.format(mask.stem)))
    result = masked("--masked-only")
    assert result.code == 2
    assert name.format(0) in result.text


@pytest.mark.parametrize("mask", [np.zeros((8, 6), np.uint8), np.full((8, 8), 3, np.uint8)])
def test_masks_that_do_not_fit_are_refused(pairs, masked, said, mask):
    Image.fromarray(mask).save(pairs / "masks" / "test" / "5.png")
    result = masked()
    said(result.text)
    assert (result.code, list(result.out.glob("test*"))) == (2, [])


def test_an_image_with_a_damaged_mask_is_not_in_the_statistics_of_bands(tmp_path, masked):
    """The sums of a chunk travel on one of its images, each of which may be that one."""
    folder = tmp_path / "wide"
    files = {f"images/{n}.npy": npy(np.full((4, 8, 8), 100 * n, np.uint16)) for n in range(4)}
    files |= {f"masks/{n}.png": encoded(picture(n, (8, 8), "1").convert("L"), "png") for n in range(4)}
    write_files(folder, files | {"classes.txt": b"0: ground\n255: object\n"})
    for damaged in range(4):
        name = f"masks/{damaged}.png"
        write_files(folder, {name: files[name][:-30]})
        table = masked("--mask-ignore 254 --overwrite", folder).dataset.band_table
        left = [100 * n for n in range(4) if n != damaged]
        assert (table.min, table.max) == ([left[0]] * 4, [left[-1]] * 4)
        write_files(folder, {name: files[name]})


@pytest.mark.parametrize("orientation", [3, 6])
def test_masks_of_turned_photographs(tmp_path, masked, said, orientation):
    """Labeling tools show photographs upright, and so are their masks."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    pixels = np.zeros((6, 8), np.uint8)
    pixels[0, :5] = 255
    image = Image.fromarray(pixels)
    mask = encoded(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(image, "png", exif=exif)))), "png")
    files = {"images/1.png": encoded(image, "png", exif=exif), "masks/1.png": mask}
    folder = write_files(tmp_path / "a", files | {"classes.txt": b"0: ground\n255: object\n"})
    refused = masked("--mask-ignore 254", folder)
    said(refused.text)
    assert refused.code == 2
    turned = masked("--mask-ignore 254 --exif-orientation apply", folder).images()["1"]
    np.testing.assert_array_equal(png(turned["png"]), png(turned["seg.png"]))
    write_files(folder, {"masks/1.png": encoded(image, "png")})
    said(masked("--mask-ignore 254 --exif-orientation apply", folder, out="b").text)


def test_the_ignored_id_is_no_class(pairs, masked):
    """As in ADE20K: 0 does not count, and the classes begin at 1."""
    for path in (pairs / "masks").rglob("*.png"):
        Image.fromarray(np.array(Image.open(path)).clip(max=2)).save(path)
    segmentation = masked("--mask-ignore 0").dataset.segmentation
    assert (segmentation.classes, segmentation.ids) == (["thing 1", "thing 2"], [1, 2])


def test_masks_shrink_with_their_images(pairs, masked):
    mask = png(masked("--resize 4").images()["0"]["seg.png"])
    whole = np.array(Image.open(pairs / "masks" / "train" / "0.png"))
    assert mask.shape == (4, 4)
    np.testing.assert_array_equal(mask[1:], whole[3::2, 1::2])


def test_masks_of_0_and_255_are_no_silent_loss(tmp_path, masked, said):
    mask = np.zeros((8, 8), np.uint8)
    mask[:4] = 255
    data = encoded(Image.fromarray(mask), "png")
    files = {"images/1.png": data, "masks/1.png": data, "classes.txt": b"ground\nobject\n"}
    folder = write_files(tmp_path / "two", files)
    said(masked(folder=folder).text)
    (folder / "classes.txt").write_text("0: ground\n255: object\n")
    dataset = masked("--mask-ignore 254 --overwrite", folder).dataset
    assert dataset.splits["train"].masks.shares == [0.5, 0.5]
    assert dataset.segmentation.ids == [0, 255]


@pytest.mark.parametrize(
    "options",
    [
        "--masks nowhere --mask-classes {}/classes.txt",
        "--masks . --mask-classes nowhere",
        "--mask-classes x",
        "--masks .",
        "--mask-ignore 3",
        "--masks {0}/masks --mask-classes {0}/classes.txt --unlabeled .",
        "--masks {0}/masks --mask-classes {0}/large.txt",
        "--masks {0}/masks --mask-classes {0}/twice.txt",
    ],
)
def test_options_that_do_not_fit(pairs, call, said, options):
    write_files(pairs, {"large.txt": b"0: a\n70000: b\n", "twice.txt": b"0: a\n0: b\n1: c\n"})
    result = call(pairs / "images", options=options.format(pairs))
    said(result.text)
    assert result.code == 2
