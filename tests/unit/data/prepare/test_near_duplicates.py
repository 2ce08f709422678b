"""prepare --exclude: copies of test images are left out, whatever their form, and nothing else."""

import json

import imagehash
import numpy as np
import pytest
from helpers.images import encoded, picture, read_back, write_files
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.data.prepare import near_duplicates
from mae_vit.data.prepare.convert import phash
from mae_vit.data.prepare.near_duplicates import Exclusion
from mae_vit.data.shards.dataset_json import read_dataset


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


def test_the_nearest_known_image_is_named():
    values = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64)
    known = Exclusion(["x:test"], [(0, f"k{n}") for n in range(250)], values.reshape(250, 2), 4)
    for value in (*(int(h) ^ 5 for h in values[:20]), 0, 2**64 - 1):
        distances = [(int(h) ^ value).bit_count() for h in values]
        distance, _, key = known.nearest(value)
        assert distance == min(distances)
        assert key in {f"k{n // 2}" for n, d in enumerate(distances) if d == distance}


COPIES = {
    "jpeg": lambda image: encoded(image, "jpeg", quality=75),
    "small": lambda image: encoded(image.resize((60, 45), Image.Resampling.BICUBIC), "png"),
    "squeezed": lambda image: encoded(image.resize((45, 60), Image.Resampling.BICUBIC), "png"),
    "bright": lambda image: encoded(image.point(lambda value: min(255, round(1.08 * value))), "png"),
    "gray": lambda image: encoded(image.convert("L"), "png"),
    "mirrored": lambda image: encoded(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "png"),
}


@pytest.fixture
def folders(tmp_path):
    """Prepared test images, and a source of other images with copies of them among its train images."""
    tests = {f"test/{n % 2}/{n}.png": encoded(picture(n, (120, 90)), "png") for n in range(12)}
    more = {f"val/{n % 2}/{n}.png": encoded(picture(n, (120, 90)), "png") for n in range(20, 22)}
    measured = write_files(tmp_path / "measured", tests | more | {"train/0/x.png": tests["test/0/0.png"]})
    assert main(["prepare", str(measured), str(tmp_path / "known")]) == 0
    files = {f"train/a/{n}.png": encoded(picture(n, (120, 90)), "png") for n in range(100, 130)}
    for number, (name, change) in enumerate(COPIES.items()):
        files[f"train/b/{name}.jpg"] = change(picture(number, (120, 90)))
    files["train/b/val.png"] = more["val/0/20.png"]
    files |= {"test/a/same.png": tests["test/0/0.png"], "test/b/other.png": encoded(picture(200), "png")}
    return write_files(tmp_path / "source", files), tmp_path / "known", tmp_path / "out"


def test_copies_of_test_images_are_left_out_and_counted(folders, tmp_path, capsys):
    source, known, out = folders
    capsys.readouterr()
    assert main(["prepare", str(source), str(out), "--exclude", str(known)]) == 0
    output = capsys.readouterr().out
    assert set(read_back(out)) == {f"a/{n}" for n in range(100, 130)}
    # What is measured on stays whole, known or not.
    assert set(read_back(out, "test")) == {"a/same", "b/other"}
    splits = read_dataset(out).splits
    (excluded,) = splits["train"].processing.excluded
    assert excluded.model_dump() == {
        "source": "known:test+val",
        "hash": "pHash of 64 bits",
        "distance": 4,
        "samples": 7,
    }
    assert splits["test"].processing.excluded is None
    assert sum(splits["train"].class_counts) == splits["train"].samples == 30
    assert "left out 7 images that known:test+val has too, by pHash of 64 bits within 4" in output
    assert "train-excluded.txt names them" in output
    lines = [line.split("\t") for line in (out / "train-excluded.txt").read_text().splitlines()]
    assert {line[0] for line in lines} == {f"b/{name}" for name in (*COPIES, "val")}
    matches = {line[0]: line[1:] for line in lines}
    for number, name in enumerate(COPIES):
        assert matches[f"b/{name}"][:2] == ["known:test+val", f"test/{number % 2}/{number}"]
        assert 0 <= int(matches[f"b/{name}"][2]) <= 4
    assert matches["b/val"] == ["known:test+val", "val/0/20", "0"]
    assert str(tmp_path) not in (out / "dataset.json").read_text() + (out / "train-excluded.txt").read_text()
    assert main(["check", str(out)]) == 0
    # Written again without the option: nothing is left of it.
    assert main(["prepare", str(source), str(out), "--overwrite"]) == 0
    assert len(read_back(out)) == 37
    assert read_dataset(out).splits["train"].processing.excluded is None
    assert not (out / "train-excluded.txt").exists()


def test_splits_are_chosen_and_distances_widened(folders, tmp_path, capsys):
    source, known, out = folders

    def left_out(*arguments) -> list[int]:
        assert main(["prepare", str(source), str(out), "--overwrite", *arguments]) == 0
        return [excluded.samples for excluded in read_dataset(out).splits["train"].processing.excluded]

    assert left_out("--exclude", f"{known}:val") == [1]
    assert left_out("--exclude", f"{known}:val", "--exclude", f"{known}:test") == [1, 6]
    assert left_out("--exclude", f"{known}:train") == [1]
    exact = left_out("--exclude", str(known), "--exclude-distance", "0")[0]
    assert 1 <= exact < 7
    assert left_out("--exclude", str(known), "--exclude-distance", "16")[0] >= 7
    (tmp_path / "a:b").symlink_to(known)
    assert left_out("--exclude", str(tmp_path / "a:b")) == [7]


def test_a_split_that_shares_nothing_is_byte_for_byte_the_same(folders, tmp_path):
    source, _, out = folders
    measured = write_files(tmp_path / "other", {"test/0/1.png": encoded(picture(999, (120, 90)), "png")})
    assert main(["prepare", str(measured), str(tmp_path / "far")]) == 0
    assert main(["prepare", str(source), str(out)]) == 0
    assert main(["prepare", str(source), str(tmp_path / "b"), "--exclude", str(tmp_path / "far")]) == 0
    one, other = (json.loads((folder / "dataset.json").read_text()) for folder in (out, tmp_path / "b"))
    assert "excluded" not in json.dumps(one)
    assert other["splits"]["train"]["processing"].pop("excluded")[0]["samples"] == 0
    assert one == other
    for shard in out.glob("*.tar"):
        assert (tmp_path / "b" / shard.name).read_bytes() == shard.read_bytes()
    assert not (tmp_path / "b" / "train-excluded.txt").exists()


def test_processes_leave_out_the_same(digits, tmp_path):
    found = []
    for workers in ("0", "1"):
        out = tmp_path / workers
        options = ["--exclude", str(digits), "--exclude-distance", "3", "--workers", workers]
        assert main(["prepare", "digits", str(out), *options]) == 0
        found.append([path.read_bytes() for path in sorted(out.glob("train*"))])
    assert found[0] == found[1]
    assert len(found[0]) == 3  # shard, index, list


BAD = {
    "no folder": (["--exclude", "{tmp}/none"], "none: data folder"),
    "no data": (["--exclude", "{tmp}/source"], "holds no shards (dataset.json is missing)"),
    "no such split": (["--exclude", "{tmp}/known:tst"], 'no split "tst": did you mean "test"?'),
    "no test split": (["--exclude", "{tmp}/train"], 'has no split "test" or "val": give one of train as'),
    "missing shards": (
        ["--exclude", "{tmp}/gone"],
        "gone/test-000000.tar cannot be used",
    ),
    "no library": (["--exclude", "{tmp}/known"], 'pip install "mae-vit[exclude]"'),
    "a distance alone": (["--exclude-distance", "3"], "changes nothing without --exclude"),
    "a distance too large": (["--exclude", "{tmp}/known", "--exclude-distance", "17"], "17: 0 to 16"),
    "nothing left": (["--exclude", "{tmp}/train:train"], 'leaves nothing of split "train"'),
    "nothing to leave out of": (["--exclude", "{tmp}/known", "--split", "test"], "leaves val and test whole"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_exclusions_are_one_line_and_write_nothing(folders, tmp_path, capsys, name, monkeypatch):
    source, known, out = folders
    if name == "no library":
        monkeypatch.setattr(near_duplicates, "find_spec", lambda name: None)
    write_files(tmp_path / "flat", {"1.png": encoded(picture(100, (120, 90)), "png")})
    assert main(["prepare", str(tmp_path / "flat"), str(tmp_path / "train")]) == 0
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "dataset.json").write_text((known / "dataset.json").read_text())
    flat = name in ("nothing left", "nothing to leave out of")
    arguments, expected = BAD[name]
    arguments = [part.format(tmp=tmp_path) for part in arguments]
    capsys.readouterr()
    assert main(["prepare", str(tmp_path / "flat" if flat else source), str(out), *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert expected in lines[0]
    assert not list(out.glob("*")) if out.exists() else True


def test_in_place_takes_no_exclusion(folders, capsys):
    _, known, _ = folders
    assert main(["prepare", "--in-place", str(known), "--exclude", str(known)]) == 2
    assert "--in-place changes no shards: --exclude needs an OUT folder" in capsys.readouterr().err
