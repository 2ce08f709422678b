"""Shards as people have them: what webdataset reads is read, or named with the remedy; no label is lost unsaid."""

import json

import pytest
import webdataset as wds
from helpers.images import read_back, write_tar
from helpers.odd_shards import IMAGES, NUMBERS, PLAIN, Members, labels, members, prepare

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset

KEPT: dict[str, tuple[str, Members, str]] = {
    "labels apart from their images": ("s-0.tar", PLAIN[::2] + PLAIN[1::2], "w"),
    "labels before images": ("s-0.tar", PLAIN[1::2] + PLAIN[::2], "w"),
    "gzip": ("s-0.tar.gz", PLAIN, "w:gz"),
    "tgz": ("s-0.tgz", PLAIN, "w:gz"),
    "bzip2": ("s-0.tar.bz2", PLAIN, "w:bz2"),
    "xz": ("s-0.tar.xz", PLAIN, "w:xz"),
    "gzip without saying so": ("s-0.tar", PLAIN, "w:gz"),
    "capitals": ("S-0.TAR", PLAIN, "w"),
    "dotted": ("s-0.tar", members("input.jpg"), "w"),
    "dotted, not for a field": ("s-0.tar", members("b.jpg"), "w"),
    "below": ("a/b/s-0.tar", PLAIN, "w"),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_labels_are_kept(tmp_path, name, alone):
    file, content, mode = KEPT[name]
    path = write_tar(tmp_path / "src" / file, content, mode)
    assert prepare(path if alone else tmp_path / "src", tmp_path / "out") == 0
    assert labels(tmp_path / "out") == NUMBERS
    assert {key: sample["jpg"] for key, sample in read_back(tmp_path / "out").items()} == {
        str(n): image for n, image in enumerate(IMAGES)
    }
    assert sorted(path.name[:6] for path in (tmp_path / "out").iterdir()) == ["datase", "train-", "train-"]


def test_webdatasets_own_writers(tmp_path):
    with wds.ShardWriter(str(tmp_path / "src-%06d.tar"), maxcount=4, verbose=0) as sink:
        for n, image in enumerate(IMAGES):
            sink.write({"__key__": f"{n}", "input.jpg": image, "cls": n % 3, "json": {"n": n}})
    assert prepare(str(tmp_path / "src-{000000..000001}.tar"), tmp_path / "out") == 0
    assert labels(tmp_path / "out") == NUMBERS


def test_labels_in_place_apart_from_their_images(tmp_path, capsys):
    write_tar(tmp_path / "s-0.tar", [*PLAIN[::2], *PLAIN[1:-1:2], ("5.cls", b"-1")])
    assert prepare("--in-place", tmp_path) == 0
    assert "1 image without a label: the class is negative" in capsys.readouterr().out
    assert read_dataset(tmp_path).splits["train"].class_counts == [2, 2, 1]
    assert main(["check", str(tmp_path)]) == 0


def test_negative_classes_are_none_and_numbers_sort_as_numbers(tmp_path, capsys):
    content = [
        (f"{n}.{kind}", data)
        for n in range(-1, 12)
        for kind, data in (("jpg", IMAGES[0]), ("cls", b"%d" % n))
    ]
    assert prepare(write_tar(tmp_path / "s.tar", content), tmp_path / "out") == 0
    assert "1 image without a label: the class is negative" in capsys.readouterr().out
    assert read_dataset(tmp_path / "out").classes == [str(n) for n in range(12)]
    assert labels(tmp_path / "out") == {str(n): str(n) for n in range(12)}


LABELED_BY: dict[str, tuple[Members, str, str, list[str]]] = {
    "json": (
        members(label="json", of=lambda n: json.dumps({"caption": "a", "label": n % 2}).encode()),
        "no labels; 6 .json members look like labels: --label-column label",
        "label",
        ["0", "1"],
    ),
    "words": (
        members(label="txt", of=lambda n: [b"cat", b"dog\n"][n % 2]),
        "no labels; 6 .txt members look like labels: --label-column txt",
        "txt",
        ["cat", "dog"],
    ),
    "label.txt": (
        members(label="label.txt", of=lambda n: [b"10", b"9"][n % 2]),
        "no labels; 6 .label.txt members look like labels: --label-column label.txt",
        "label.txt",
        [str(n) for n in range(11)],
    ),
}


@pytest.mark.parametrize("name", LABELED_BY)
def test_what_looks_like_labels_is_named_and_taken_if_asked_for(tmp_path, capsys, name):
    content, hint, column, classes = LABELED_BY[name]
    path = write_tar(tmp_path / "src" / "s-0.tar", content)
    assert prepare(path, tmp_path / "out") == 0
    assert hint in capsys.readouterr().out
    assert prepare("--in-place", tmp_path / "src") == 0
    assert f"{hint}, of `mae-vit prepare {tmp_path}/src OUT`" in capsys.readouterr().out
    (tmp_path / "src" / "dataset.json").unlink()
    assert prepare(path, tmp_path / "labeled", "--label-column", column) == 0
    assert read_dataset(tmp_path / "labeled").classes == classes
    assert len(labels(tmp_path / "labeled")) == 6
    assert "look like labels" not in capsys.readouterr().out


def test_captions_are_no_labels(tmp_path, capsys):
    path = write_tar(tmp_path / "s.tar", members(label="txt", of=lambda n: b"photo %d" % n))
    assert prepare(path, tmp_path / "out") == 0
    assert "look like labels" not in capsys.readouterr().out


def test_of_several_images_the_plain_one_is_taken_or_the_one_that_is_asked_for(tmp_path, capsys):
    content = [
        m
        for n in range(3)
        for m in ((f"{n}.jpg", IMAGES[n]), (f"{n}.small.jpg", IMAGES[3]), (f"{n}.cls", b"0"))
    ]
    path = write_tar(tmp_path / "s.tar", content)
    assert prepare(path, tmp_path / "out") == 0
    assert (
        "left out images beside others of their samples: small.jpg (--image-column)"
        in capsys.readouterr().out
    )
    assert read_back(tmp_path / "out")["1"]["jpg"] == IMAGES[1]
    assert prepare(path, tmp_path / "small", "--image-column", "small.jpg") == 0
    assert read_back(tmp_path / "small")["1"]["jpg"] == IMAGES[3]


def test_pairs_without_labels_are_all_taken_and_it_is_said(tmp_path, capsys):
    pairs = [(f"{n}.{side}.jpg", IMAGES[n]) for n in range(3) for side in ("input", "target")]
    assert prepare(write_tar(tmp_path / "s.tar", pairs), tmp_path / "out") == 0
    assert (
        "took all images of 3 samples, which have 2 each (input.jpg, target.jpg)" in capsys.readouterr().out
    )
    dotted = [(f"my.photo.{n}.jpg", image) for n, image in enumerate(IMAGES)]
    assert prepare(write_tar(tmp_path / "b.tar", dotted), tmp_path / "b") == 0
    assert "took all" not in capsys.readouterr().out
    assert len(read_back(tmp_path / "b")) == 6


def test_whole_numbers_with_a_point_are_numbers(tmp_path):
    write_tar(tmp_path / "src" / "s-0.tar", members(of=lambda n: b"%d.0" % (n % 3)))
    assert prepare(tmp_path / "src", tmp_path / "out") == 0
    assert labels(tmp_path / "out") == NUMBERS


@pytest.mark.parametrize(
    "label", [b"0,3", b"[0]", b"[1, 0, 0]", b"tensor(2)", b"0.5", b"0 3", b"\3\0\0\0", b'{"class": 1}']
)
def test_what_is_no_single_label_is_refused_and_its_sample_named(tmp_path, capsys, label):
    write_tar(tmp_path / "s-0.tar", members(of=lambda n: label if n == 4 else b"1"))
    assert prepare(tmp_path / "s-0.tar", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "s-0.tar: the label of 4 is " in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert prepare(tmp_path / "s-0.tar", tmp_path / "out", "--no-labels") == 0


def test_names_with_brackets_and_commas_are_labels(tmp_path):
    write_tar(tmp_path / "s-0.tar", members(of=lambda n: (b"(other)", b"bass, sea", b"2 cats")[n % 3]))
    assert prepare(tmp_path / "s-0.tar", tmp_path / "out") == 0
    assert read_dataset(tmp_path / "out").classes == ["(other)", "2 cats", "bass, sea"]


def test_images_of_samples_are_known_by_their_first_bytes(tmp_path, capsys):
    write_tar(tmp_path / "src" / "s-0.tar", members("image"))
    assert prepare(tmp_path / "src", tmp_path / "out") == 0
    assert labels(tmp_path / "out") == NUMBERS
    assert (
        "took the .image members for images, by their first bytes (--image-column)" in capsys.readouterr().out
    )
    assert prepare(tmp_path / "src", tmp_path / "b", "--image-column", "image") == 0
    assert labels(tmp_path / "b") == NUMBERS


def test_samples_without_an_image_are_counted(tmp_path, capsys):
    write_tar(tmp_path / "s-0.tar", [*PLAIN, ("a.heic", b"x"), ("a.cls", b"1"), ("b.mp4", b"x")])
    assert prepare(tmp_path / "s-0.tar", tmp_path / "out") == 0
    assert "skipped 2 samples without an image: a, b\n" in capsys.readouterr().out
    assert prepare(tmp_path / "s-0.tar", tmp_path / "b", "--image-column", "heic") == 2
