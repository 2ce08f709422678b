"""prepare --exclude: copies of test images are left out, whatever their form, and nothing else."""

import json
import shutil

import imagehash
import numpy as np
import pytest
from helpers.images import encoded, picture, write_files
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.data.prepare import near_duplicates
from mae_vit.data.prepare.convert import phash

SIZE = (60, 45)


def hashes(image: Image.Image) -> tuple[int, int]:
    array = np.asarray(image)
    return phash(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(32, 32), (40, 30), (17, 90), (300, 200)])
def test_the_hash_is_that_of_imagehash_and_mirrored_images_have_each_others(mode, size):
    image = picture(3, size, mode)
    (there, back), mirrored = hashes(image), hashes(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert there == int(str(imagehash.phash(image)), 16) != back
    assert (there ^ mirrored[1]).bit_count() <= 2
    assert (back ^ mirrored[0]).bit_count() <= 2


COPIES = {
    "jpeg": lambda image: encoded(image, "jpeg", quality=75),
    "small": lambda image: encoded(image.resize((40, 30), Image.Resampling.BICUBIC), "png"),
    "squeezed": lambda image: encoded(image.resize((45, 60), Image.Resampling.BICUBIC), "png"),
    "bright": lambda image: encoded(image.point(lambda value: min(255, round(1.08 * value))), "png"),
    "gray": lambda image: encoded(image.convert("L"), "png"),
    "mirrored": lambda image: encoded(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "png"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source of images with copies among them, and prepared test images in `known`."""
    folder = tmp_path_factory.mktemp("copies")
    tests = {f"test/{n % 2}/{n}.png": encoded(picture(n, SIZE), "png") for n in range(8)}
    more = {"val/0/20.png": encoded(picture(20, SIZE), "png")}
    known = tests | more | {"train/0/x.png": tests["test/0/0.png"]}
    for name, files in (("known", known), ("train", {"1.png": encoded(picture(100, SIZE), "png")})):
        source = write_files(folder / f"{name}_source", files)
        assert main(["prepare", str(source), str(folder / name), "--workers", "0"]) == 0
    files = {f"train/a/{n}.png": encoded(picture(n, SIZE), "png") for n in range(100, 110)}
    for number, (name, change) in enumerate(COPIES.items()):
        files[f"train/b/{name}.jpg"] = change(picture(number, SIZE))
    files["train/b/val.png"] = more["val/0/20.png"]
    files |= {"test/a/same.png": tests["test/0/0.png"], "test/b/other.png": encoded(picture(200), "png")}
    write_files(folder / "source", files)
    (folder / "gone").mkdir()
    shutil.copy(folder / "known" / "dataset.json", folder / "gone")
    return folder


def test_copies_of_test_images_are_left_out_and_counted(folders, call, said):
    source = folders / "source"
    result = call(source, options=f"--exclude {folders}/known")
    said(result.text)
    assert set(result.images()) == {f"a/{n}" for n in range(100, 110)}
    # What is measured on stays whole, known or not.
    assert set(result.images("test")) == {"a/same", "b/other"}
    splits = result.dataset.splits
    (excluded,) = splits["train"].processing.excluded
    assert (excluded.source, excluded.distance, excluded.samples) == ("known:test+val", 4, 7)
    assert splits["test"].processing.excluded is None
    text = (result.out / "train-excluded.txt").read_text()
    matches = {line.split("\t")[0]: line.split("\t")[1:] for line in text.splitlines()}
    assert set(matches) == {f"b/{name}" for name in (*COPIES, "val")}
    for number, name in enumerate(COPIES):
        assert matches[f"b/{name}"][:2] == ["known:test+val", f"test/{number % 2}/{number}"]
        assert 0 <= int(matches[f"b/{name}"][2]) <= 4
    assert matches["b/val"] == ["known:test+val", "val/0/20", "0"]
    assert str(folders) not in (result.out / "dataset.json").read_text() + text
    # Written again without the option: nothing is left of it.
    again = call(source, options="--overwrite")
    assert len(again.images()) == 17
    assert again.dataset.splits["train"].processing.excluded is None
    assert not (again.out / "train-excluded.txt").exists()
    # A data set that shares nothing changes no byte.
    far = call(source, options=f"--exclude {folders}/train:train", out="far")
    one, other = (json.loads((folder / "dataset.json").read_text()) for folder in (again.out, far.out))
    assert other["splits"]["train"]["processing"].pop("excluded")[0]["samples"] == 1
    assert one["splits"]["test"] == other["splits"]["test"]


def test_splits_are_chosen(folders, call):
    options = f"--exclude {folders}/known:val --exclude {folders}/known:test"
    processing = call(folders / "source", options=options).dataset.splits["train"].processing
    assert [excluded.samples for excluded in processing.excluded] == [1, 6]


# Options, and the folder that is prepared.
BAD = {
    "no folder": ("--exclude {f}/none", "source"),
    "no data": ("--exclude {f}/source", "source"),
    "no such split": ("--exclude {f}/known:tst", "source"),
    "no test split": ("--exclude {f}/train", "source"),
    "missing shards": ("--exclude {f}/gone", "source"),
    "no library": ("--exclude {f}/known", "source"),
    "nothing left": ("--exclude {f}/train:train", "train_source"),
    "nothing to leave out of": ("--exclude {f}/known --split test", "train_source"),
    "in place": ("--in-place --exclude {f}/known", "known"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_exclusions_are_one_line_and_write_nothing(folders, call, said, name, monkeypatch):
    if name == "no library":
        monkeypatch.setattr(near_duplicates, "find_spec", lambda name: None)
    options, source = BAD[name]
    result = call(folders / source, options=options.format(f=folders))
    said(result.text.replace(str(folders), "FOLDER"))
    assert result.code == 2
    assert name == "in place" or not list(result.out.glob("*"))
