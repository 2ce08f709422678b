"""prepare: what is written, that others can read it, and that nothing is half-written."""

import gzip
import shlex
import shutil

import numpy as np
import pytest
import webdataset as wds
from helpers.damage import description
from helpers.images import encoded, picture, write_files, write_tar

from mae_vit.cli.main import main
from mae_vit.data.images.decode import decode
from mae_vit.data.prepare.publish import only_writer
from mae_vit.data.shards.dataset_json import file_digest, read_dataset

PNG = encoded(picture(9, (12, 10)), "png")


@pytest.fixture
def tree(tmp_path) -> dict[str, bytes]:
    """Two splits of three classes under one top folder, with names that need care."""
    files = {
        f"{split}/{name}/{image:03d}.v1.jpg": encoded(
            picture(10 * number + image + 50 * (split == "test"), (12, 10))
        )
        for split, count in (("train", 7), ("test", 3))
        for number, name in enumerate(("cat", "dog.wild", "eel"))
        for image in range(count)
    }
    files["train/cat/000.v1.png"] = PNG  # the same stem as a jpg
    write_files(tmp_path / "src", files | {"README.txt": b"not an image"})
    return files


def read_by_webdataset(out, split="train") -> dict[str, tuple[bytes, int]]:
    """Every sample through webdataset: key -> (image bytes, class)."""
    shards = sorted(str(path) for path in out.glob(f"{split}-*.tar"))
    samples = {}
    for sample in wds.WebDataset(shards, shardshuffle=False):
        extension = next(key for key in sample if key in ("jpg", "png"))
        assert sample["__key__"] not in samples
        samples[sample["__key__"]] = (sample[extension], int(sample["cls"]))
    return samples


def test_webdataset_reads_the_same_bytes_and_statistics_are_those_of_the_pixels(
    tree, tmp_path, call, capsys, said
):
    result = call(tmp_path / "src", options="--shard-samples 5")
    said(result.text)
    dataset = result.dataset
    assert dataset.classes == ["cat", "dog.wild", "eel"]
    for split in ("train", "test"):
        expected = [
            (d, dataset.classes.index(p.split("/")[1])) for p, d in tree.items() if p.startswith(split)
        ]
        samples = read_by_webdataset(result.out, split)
        assert sorted(samples.values()) == sorted(expected)
        assert len(dataset.splits[split].shards) == -(-len(expected) // 5)
    assert "dog.wild/000_v1" in read_by_webdataset(result.out)
    pixels = [decode(data, 3).reshape(3, -1) / 255 for path, data in tree.items() if path.startswith("train")]
    np.testing.assert_allclose(dataset.mean, np.concatenate(pixels, axis=1).mean(axis=1), atol=2e-6)
    np.testing.assert_allclose(dataset.std, np.concatenate(pixels, axis=1).std(axis=1), atol=2e-6)
    info = dataset.splits["train"]
    assert (info.height, info.width, info.samples, dataset.statistics_images) == ((10, 10), (12, 12), 22, 22)
    assert (info.formats, info.class_counts) == ({"jpg": 21, "png": 1}, [8, 7, 7])
    # Equal sources give equal bytes.
    again = call(tmp_path / "src", options="--shard-samples 5", out="again")
    for path in result.out.glob("*[!g]"):
        assert path.is_dir() or path.read_bytes() == (again.out / path.name).read_bytes()
    assert main(["check", str(result.out), "--decode"]) == 0
    # Of an image that was damaged before its shard was described, decoding alone tells.
    path = result.out / info.shards[0].file
    path.write_bytes(path.read_bytes().replace(b"\xff\xd8\xff", bytes(3), 1))
    with description(result.out) as described:
        described["splits"]["train"]["shards"][0]["sha256"] = file_digest(path)
    assert main(["check", str(result.out)]) == 0
    capsys.readouterr()
    assert main(["check", str(result.out), "--decode"]) == 1
    said(capsys.readouterr().out)


def test_digits_are_gray_and_shards_mix_their_classes(digits):
    dataset = read_dataset(digits)
    assert (dataset.channels, len(dataset.mean)) == (1, 1)
    assert {name: split.samples for name, split in dataset.splits.items()} == {"train": 1497, "test": 300}
    for counts in zip(*(split.class_counts for split in dataset.splits.values()), strict=True):
        assert abs(min(counts) - sum(counts) / 6) <= 0.5
    labels = [label for _, label in read_by_webdataset(digits).values()][:100]
    assert len(set(labels)) == 10
    assert max(labels.count(label) for label in set(labels)) < 25


def test_a_later_call_adds_a_split_with_the_same_classes(tree, tmp_path, call, said):
    first = call(tmp_path / "src" / "train").dataset
    test = tmp_path / "src" / "test"
    for name in ("cat", "eel"):  # a split may lack classes
        for path in (test / name).iterdir():
            path.unlink()
    both = call(test, options="--split test").dataset
    assert both.splits["train"] == first.splits["train"]
    assert both.mean == first.mean
    assert both.splits["test"].class_counts == [0, 3, 0]
    refused = call(test, options="--split test")
    said(refused.text)
    assert refused.code == 2
    assert call(test, options="--split test --overwrite").code == 0


def test_a_split_without_labels_joins_one_with(tmp_path, call, said):
    photos = write_files(tmp_path / "flat", {"1.png": PNG})
    classes = write_files(tmp_path / "classes", {"a/1.png": PNG, "b/2.png": PNG})
    expected = "train: a 1, b 1 | unlabeled: - 1"
    assert call(classes).code == call(photos, options="--split unlabeled").code == 0
    assert call(classes, options="--overwrite").counts() == expected
    said(call({"c/1.png": PNG}, options="--split val").text)
    # And the other way round: classes come with the first split that has them.
    assert call(photos, options="--split unlabeled", out="b").code == 0
    assert call(classes, out="b").counts() == expected


def test_an_overwrite_that_ends_early_leaves_no_old_split_beside_new_classes(tmp_path, call):
    old = {f"{split}/{name}/1.png": PNG for split in ("train", "val") for name in "ab"}
    assert call(write_files(tmp_path / "old", old)).code == 0
    new = {"train/c/1.png": PNG, "train/d/2.png": PNG, "val/c/1.png": b"damaged"}
    ended = call(write_files(tmp_path / "new", new), options="--overwrite")
    assert (ended.code, ended.counts()) == (2, "train: c 1, d 1")


def test_held_out_images_do_not_return_into_train(tmp_path, call, said):
    source = write_files(tmp_path / "photos", {f"{n}.jpg": encoded(picture(n)) for n in range(6)})
    before = call(source, options="--holdout 1/3")
    refused = call(source, options="--overwrite")
    said(refused.text)
    assert (refused.code, refused.counts()) == (2, before.counts())
    assert call(source, options="--overwrite --holdout 1/3").counts() == before.counts()
    assert (
        call(source, options="--overwrite --split val").code == call(source, options="--overwrite").code == 0
    )


def test_a_split_that_was_prepared_otherwise_is_noted(tmp_path, call):
    source = write_files(tmp_path / "photos", {f"{n}.jpg": encoded(picture(n)) for n in range(4)})
    assert call(source, options="--resize 16").code == 0
    assert "warning: val" in call(source, options="--split val").text
    again = call(source, options="--split val --resize 16 --overwrite")
    assert "warning" not in again.text


BAD = {
    "missing source": "nowhere",
    "misspelled source": "{tmp}/mixd",
    "misspelled folder": "{tmp}/mixd/train",
    "misspelled name": "digit",
    "one split twice": "{tmp}/src {tmp}/src",
    "damaged archive": "{tmp}/broken.tar",
    "damaged gzip": "{tmp}/broken.tar.gz",
    "damaged inside of a gzip": "{tmp}/inside.tar.gz",
    "no tar in a gzip": "{tmp}/no_tar.tar.gz",
    "no output": "",
    "shard size": "{tmp}/src --shard-mib 0",
    "a root of no download": "{tmp}/src --root {tmp}",
    "a split of what has its own": "digits --split x",
    "labels that are not wanted": "{tmp}/src --no-labels --class-folder last",
    "a column of a folder": "{tmp}/mixed --label-column x",
    "a split of a file that names its own": "{tmp}/my_test.tar --split train",
    "no copy of cifar10": "cifar10 --root {tmp}/none",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_writes_nothing(tree, tmp_path, capsys, said, name, monkeypatch):
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    contents = {
        "mixed/cat/1.png": PNG,
        "broken.tar": b"x" * 2000,
        "broken.tar.gz": b"x" * 2000,
        # A gzip header, and then no valid block: zlib's error, not gzip's.
        "inside.tar.gz": gzip.compress(b"")[:10] + b"\xff" * 2000,
        "no_tar.tar.gz": gzip.compress(b"x" * 2000),
    }
    write_files(tmp_path, contents)
    write_tar(tmp_path / "my_test.tar", {"cat/1.png": PNG})
    words = [word.format(tmp=tmp_path) for word in BAD[name].split()]
    assert main(["prepare", *words, str(tmp_path / "out" / "deep")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    said(line.partition(" (HTTP")[0].partition(" (<url")[0])
    assert not (tmp_path / "out").exists()


def test_a_shard_that_the_description_beside_it_lacks_is_read(tmp_path, call):
    out = call({"cat/1.png": PNG}, options="--split test").out
    shutil.copy(out / "test-000000.tar", out / "train-000007.tar")
    assert call(*sorted(out.glob("*.tar")), out="again").counts() == "test: cat 1 | train: cat 1"


def test_shards_of_others_are_not_replaced(tree, tmp_path, call, said):
    out = write_files(tmp_path / "out", {"train-000000.tar": b"precious"})
    refused = call(tmp_path / "src")
    said(refused.text)
    assert refused.code == 2
    assert (out / "train-000000.tar").read_bytes() == b"precious"
    assert call(tmp_path / "src", options="--overwrite").code == 0


def test_two_calls_do_not_write_into_a_folder_at_once(tree, tmp_path, call):
    with only_writer(tmp_path / "out"):
        refused = call(tmp_path / "src")
    assert (refused.code, "in use by another prepare" in refused.text) == (2, True)
    assert call(tmp_path / "src").code == 0


def test_shards_left_by_a_kill_while_moving_are_replaced(tree, tmp_path, call):
    write_files(tmp_path / "out", {"train-000000.tar": b"half of an earlier call"})
    (tmp_path / "out" / ".train.partial").mkdir()
    assert main(["check", str(call(tmp_path / "src").out)]) == 0


def test_a_record_that_cannot_be_written_is_one_line(tmp_path, call):
    (tmp_path / "out" / "prepare.log").mkdir(parents=True)
    result = call({"1.png": PNG})
    assert (result.code, result.text.splitlines()[-1]) == (
        2,
        f"error: {result.out}/prepare.log: is a directory",
    )


def test_the_record_has_the_commands_and_names_all_that_was_left_out(tmp_path, call):
    bad = {f"cat/{n}.jpg": b"no image" for n in range(100, 109)} | {"cat/notes.txt": b"x", "cat/a.heic": b"x"}
    source = write_files(
        tmp_path / "my photos", {**{f"cat/{n}.jpg": encoded(picture(n)) for n in range(4)}, **bad}
    )
    result = call(source, options="--holdout 1/4")
    record = (result.out / "prepare.log").read_text()
    for path in bad:
        assert f"\n{path}: " in record
    assert result.text.count("no image") < 9
    first = next(line for line in record.splitlines() if line.startswith("$ "))
    assert shlex.split(first)[1:4] == ["mae-vit", "prepare", str(source)]
    # A split that is added keeps the record of the others.
    call({"1.jpg": encoded(picture(9))}, options="--split more --no-labels")
    added = (result.out / "prepare.log").read_text()
    assert added.startswith(record)
    assert added.count("$ mae-vit prepare") == 2
