"""`mae-vit prepare --masks`: pairs, what is checked of them, and what is printed."""

import json
import tarfile

import numpy as np
import pytest
from helpers.images import write_pairs
from PIL import Image

from mae_vit.cli.main import main


def refusal(capsys) -> str:
    """The error: the last line, behind those of progress bars."""
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("mae-vit: error: ")
    return line


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs", count=12)


def call(pairs, out, *options) -> int:
    masks = ["--masks", str(pairs / "masks"), "--mask-classes", str(pairs / "classes.txt")]
    return main(["prepare", str(pairs / "images"), str(out), *masks, "--workers", "0", *options])


def test_masks_lie_beside_their_images(pairs, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(pairs, out) == 0
    dataset = json.loads((out / "dataset.json").read_text())
    assert dataset["segmentation"] == {
        "classes": ["ground", "thing 1", "thing 2"],
        "ids": [0, 1, 2],
        "ignore": 255,
    }
    for split in ("train", "test"):
        masks = [np.array(Image.open(path)) for path in (pairs / "masks" / split).iterdir()]
        counted = np.bincount(np.concatenate([mask.ravel() for mask in masks]), minlength=256)
        shares = dataset["splits"][split]["masks"]
        assert shares["shares"] == pytest.approx(counted[:3] / counted[:3].sum(), abs=1e-6)
        assert shares["ignored"] == pytest.approx(2 / 64, abs=1e-6)
        with tarfile.open(out / f"{split}-000000.tar") as tar:
            for number in range(12):
                stored = tar.extractfile(f"{number}.seg.png").read()
                assert stored == (pairs / "masks" / split / f"{number}.png").read_bytes()
    assert "masks of 3 classes: " in capsys.readouterr().out


def test_missing_masks_are_named(pairs, tmp_path, capsys):
    for number in (3, 7):
        (pairs / "masks" / "train" / f"{number}.png").unlink()
    assert call(pairs, tmp_path / "out") == 2
    assert "no mask for 2 images of 24: train/3.png, train/7.png" in refusal(capsys)
    assert not (tmp_path / "out").exists()
    assert call(pairs, tmp_path / "out", "--masked-only") == 0
    assert "left out 2 images without a mask" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["splits"]["train"]["samples"] == 10


@pytest.mark.parametrize("name", ["{}.jpg", "{}_mask.png"])
def test_masks_of_other_names_are_named(pairs, tmp_path, capsys, name):
    for mask in list((pairs / "masks").rglob("*.png")):
        mask.rename(mask.with_name(name.format(mask.stem)))
    assert call(pairs, tmp_path / "out", "--masked-only") == 2
    assert f"{name.format(0)}: write masks as PNGs, by the names of their images)" in refusal(capsys)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.zeros((8, 6), np.uint8), "6x8 px, its image 8x8"),
        (np.full((8, 8), 3, np.uint8), "pixel (0, 0) has the id 3, which is no class"),
    ],
)
def test_masks_that_do_not_fit_are_refused(pairs, tmp_path, capsys, mask, said):
    Image.fromarray(mask).save(pairs / "masks" / "test" / "5.png")
    assert call(pairs, tmp_path / "out") == 2
    line = refusal(capsys)
    assert "test/5.png" in line
    assert said in line
    assert not list((tmp_path / "out").glob("test*"))


def test_damaged_masks_are_left_out(pairs, tmp_path, capsys):
    path = pairs / "masks" / "train" / "4.png"
    path.write_bytes(path.read_bytes()[:-30])
    assert call(pairs, tmp_path / "out") == 0
    assert "the mask of train/4.png" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["splits"]["train"]["samples"] == 11


def test_the_ignored_id_is_no_class(pairs, tmp_path):
    """As in ADE20K: 0 does not count, and the classes begin at 1."""
    for path in (pairs / "masks").rglob("*.png"):
        Image.fromarray(np.array(Image.open(path)).clip(max=2)).save(path)
    assert call(pairs, tmp_path / "out", "--mask-ignore", "0") == 0
    dataset = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert dataset["segmentation"] == {"classes": ["thing 1", "thing 2"], "ids": [1, 2], "ignore": 0}


def test_masks_shrink_with_their_images(pairs, tmp_path):
    assert call(pairs, tmp_path / "out", "--resize", "4") == 0
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        mask = np.array(Image.open(tar.extractfile("0.seg.png")))
    whole = np.array(Image.open(pairs / "masks" / "train" / "0.png"))
    assert mask.shape == (4, 4)
    np.testing.assert_array_equal(mask[1:], whole[3::2, 1::2])


def test_other_classes_do_not_join(pairs, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(pairs, out) == 0
    more = write_pairs(tmp_path / "more", splits=("val",), classes=4)
    capsys.readouterr()
    assert call(more, out) == 2
    assert "masks of 3 classes" in refusal(capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mask-classes", "x"], "--mask-classes changes nothing without --masks"),
        (["--masks", "nowhere", "--mask-classes", "x"], "--masks nowhere is no folder"),
        (["--masks", "."], "--masks needs --mask-classes FILE"),
    ],
)
def test_options_that_do_not_fit(pairs, tmp_path, capsys, options, said):
    assert main(["prepare", str(pairs / "images"), str(tmp_path / "out"), *options]) == 2
    assert said in refusal(capsys)


def test_masks_without_an_image_are_counted(pairs, tmp_path, capsys):
    (pairs / "images" / "train" / "3.png").unlink()
    assert call(pairs, tmp_path / "out") == 0
    assert f"1 mask of {pairs / 'masks'} without an image\n" in capsys.readouterr().out
