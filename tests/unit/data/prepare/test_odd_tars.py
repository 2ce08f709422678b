"""Tars as people have them: of one class each, in tars, with links and holes; what is not read is named."""

import bz2
import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.images import read_back, write_files, write_tar
from helpers.odd_shards import IMAGES, NUMBERS, PLAIN, labels, members, prepare

from mae_vit.core.errors import InputError
from mae_vit.core.urls import check_url
from mae_vit.data.shards.dataset_json import read_dataset


def class_tars(folder: Path, *names: str) -> Path:
    for name in names:
        write_tar(folder / f"{name}.tar", {f"{name}_{n}.JPEG": image for n, image in enumerate(IMAGES[:2])})
    return folder


@pytest.mark.parametrize("names", [("n01440764", "n01443537"), ("cat", "dog"), ("bolt", "test_tube")])
def test_tars_of_one_class_each(tmp_path, capsys, names):
    folder = class_tars(tmp_path / "src", *names)
    with tarfile.open(tmp_path / "ILSVRC2012_img_train.tar", "w") as tar:
        tar.add(folder, "", filter=lambda member: None if member.name == "dataset.json" else member)
    for source in (folder, tmp_path / "ILSVRC2012_img_train.tar"):
        out = tmp_path / f"out-{source.name}"
        assert prepare(source, out) == 0
        assert "took each of 2 tars for the class of its name (--no-labels)" in capsys.readouterr().out
        assert read_dataset(out).classes == list(names)
        assert read_dataset(out).splits["train"].class_counts == [2, 2]
    assert prepare(folder, tmp_path / "plain", "--no-labels") == 0
    assert read_dataset(tmp_path / "plain").classes == []
    capsys.readouterr()
    assert prepare("--in-place", folder) == 0
    assert "OUT` takes each tar for the class of its name" in capsys.readouterr().out


def test_shards_in_a_tar_are_shards_and_numbered_tars_are_parts(tmp_path):
    for number in range(2):
        write_tar(tmp_path / "src" / f"s-{number}.tar", [(f"{number}{name}", data) for name, data in PLAIN])
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(tmp_path / "src", "shards")
    assert prepare(tmp_path / "all.tar", tmp_path / "out") == 0
    assert labels(tmp_path / "out") == {f"{s}{n}": str(n % 3) for s in range(2) for n in range(6)}
    for number in range(2):
        classes = {f"{name}/{number}.jpg": IMAGES[number] for name in ("cat", "dog")}
        write_tar(tmp_path / "parts" / f"photos{number}.tar", classes)
    assert prepare(*sorted((tmp_path / "parts").iterdir()), tmp_path / "b") == 0
    assert read_dataset(tmp_path / "b").splits["train"].class_counts == [2, 2]


def test_tars_tell_their_splits(tmp_path):
    classes = {f"{name}/{n}.jpg": IMAGES[n] for name in ("cat", "dog") for n in range(2)}
    paths = [write_tar(tmp_path / f"photos_{split}.tar", classes) for split in ("training", "validation")]
    assert prepare(*paths, tmp_path / "out") == 0
    assert {name: split.class_counts for name, split in read_dataset(tmp_path / "out").splits.items()} == {
        "train": [2, 2], "val": [2, 2]
    }  # fmt: skip
    write_tar(tmp_path / "src" / "train" / "a" / "000.tar", PLAIN)
    write_tar(tmp_path / "src" / "test" / "a" / "000.tar", PLAIN)
    assert prepare(tmp_path / "src", tmp_path / "b") == 0
    assert set(read_dataset(tmp_path / "b").splits) == {"train", "test"}


def test_a_picture_beside_shards_is_left_out_and_named(tmp_path, capsys):
    write_tar(tmp_path / "src" / "s-0.tar", PLAIN)
    write_files(tmp_path / "src", {"example.jpg": IMAGES[0], "README.md": b"x"})
    assert prepare(tmp_path / "src", tmp_path / "out") == 0
    assert "left out 1 image beside the tars: example.jpg" in capsys.readouterr().out
    assert labels(tmp_path / "out") == NUMBERS


def test_images_in_folders_and_shards_are_a_question(tmp_path, capsys):
    source = write_files(
        tmp_path / "src", {f"{c}/{n}.jpg": IMAGES[n] for c in ("cat", "dog") for n in range(2)}
    )
    write_tar(source / "annotations.tar", {"a.xml": b"x"})
    assert prepare(source, tmp_path / "out") == 0
    assert read_dataset(tmp_path / "out").classes == ["cat", "dog"]
    write_tar(source / "s-0.tar", PLAIN)
    assert prepare(source, tmp_path / "b") == 2
    assert (
        "src holds 4 images (cat/0.jpg, ...) and 1 tar of images (s-0.tar, ...): which are the data?"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "b").exists()


def gnu_tar(path: Path, folder: Path, *options: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["tar", *options, "-cf", str(path), "-C", str(folder), "."], check=True)
    return path


@pytest.mark.parametrize("kind", ["gnu", "pax", "pax --sparse-version=0.0", "pax --sparse-version=0.1"])
def test_sparse_members_are_named(tmp_path, capsys, kind):
    folder = write_files(tmp_path / "photos", {"cat/1.jpg": IMAGES[0], "cat/hole.bmp": b"BM"})
    os.truncate(folder / "cat" / "hole.bmp", 1 << 20)
    path = gnu_tar(tmp_path / "src" / "a.tar", folder, "--sparse", *f"--format={kind}".split())
    for arguments in (
        [path, tmp_path / "out"],
        [tmp_path / "src", tmp_path / "out"],
        ["--in-place", tmp_path / "src"],
    ):
        assert prepare(*arguments) == 2
        assert capsys.readouterr().err.endswith(
            f"{path}: ./cat/hole.bmp is a sparse file, whose holes are not stored: pack it without --sparse\n"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["v7", "ustar", "gnu", "pax"])
def test_links_in_an_archive_lead_to_its_files(tmp_path, capsys, kind):
    folder = write_files(tmp_path / "photos", {"cat/1.jpg": IMAGES[0], "dog/2.jpg": IMAGES[1]})
    os.link(folder / "cat" / "1.jpg", folder / "dog" / "hard.jpg")
    (folder / "dog" / "soft.jpg").symlink_to("../cat/1.jpg")
    (folder / "dog" / "out.jpg").symlink_to("/etc/passwd")
    assert prepare(gnu_tar(tmp_path / "a.tar", folder, f"--format={kind}"), tmp_path / "out") == 0
    found = read_back(tmp_path / "out")
    assert set(found) == {"cat/1", "dog/2", "dog/hard", "dog/soft"}
    assert found["dog/hard"]["jpg"] == found["dog/soft"]["jpg"] == IMAGES[0]
    assert "skipped 1 members that are links" in capsys.readouterr().out


def test_links_in_shards_are_followed_or_counted(tmp_path, capsys):
    with tarfile.open(write_tar(tmp_path / "s.tar", [*PLAIN, ("9.cls", b"1")]), "a") as tar:
        for name, target in (("9.jpg", "0.jpg"), ("10.jpg", "gone.jpg")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, target
            tar.addfile(link)
    assert prepare(tmp_path / "s.tar", tmp_path / "out") == 0
    found = read_back(tmp_path / "out")
    assert found["9"]["jpg"] == found["0"]["jpg"]
    assert labels(tmp_path / "out")["9"] == "1"
    assert "skipped 1 member of shards that are links, devices or pipes" in capsys.readouterr().out


def test_names_with_dots_are_no_samples(tmp_path, capsys):
    pairs = [
        (f"cat.{n}.{kind}", data) for n in range(2) for kind, data in (("jpg", IMAGES[n]), ("txt", b"x"))
    ]
    assert prepare(write_tar(tmp_path / "s.tar", pairs), tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert (
        "key cat (0.jpg, 1.jpg): a key ends at the first dot, so name the files without further dots, or"
        in said
    )


def test_absolute_names_are_refused_with_the_remedy(tmp_path, capsys):
    assert prepare(write_tar(tmp_path / "a.tar", {"/home/me/cat/1.jpg": IMAGES[0]}), tmp_path / "out") == 2
    assert (
        "refused: unpack it, and pack it without absolute names (tar without -P)" in capsys.readouterr().err
    )


def joined(folder: Path) -> Path:
    one, two = (write_tar(folder / name, members()[:2]) for name in ("a.bin", "b.bin"))
    (folder / "s.tar").write_bytes(one.read_bytes() + two.read_bytes())
    return folder / "s.tar"


def zstd(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "s.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    return folder / "s.tar.zst"


def inner_gzip(folder: Path) -> Path:
    stream = io.BytesIO(write_tar(folder / "x", PLAIN, "w:gz").read_bytes())
    return write_tar(folder / "s.tar", {"shard-0.tar.gz": stream.getvalue()})


def pairs(folder: Path) -> Path:
    content = [(f"0.{name}", IMAGES[0]) for name in ("input.jpg", "target.jpg")]
    return write_tar(folder / "s.tar", [*content, ("0.cls", b"0")])


REFUSED: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "joined by cat": (joined, [], "s.tar: more follows its end at offset "),
    "zstd": (zstd, [], "s.tar.zst is compressed by zstd: decompress it (`zstd -d "),
    "compressed inside": (inner_gzip, [], "holds shard-0.tar.gz: unpack it, and give the folder"),
    "two images": (
        pairs,
        [],
        "two images under the key 0 (input.jpg, target.jpg): `--image-column NAME` takes one of each",
    ),
    "no such image": (
        pairs,
        ["--image-column", "jpg"],
        "--image-column jpg: no sample has such a member: there are cls, input.jpg, target.jpg",
    ),
    "no such label": (
        lambda folder: write_tar(folder / "s.tar", members(label="json", of=lambda n: b'{"kind": 1}')),
        ["--label-column", "label"],
        "--label-column label: no sample has such a member, or key of its json: there are jpg, json, and in json kind",
    ),
    "a label that is a list": (
        lambda folder: write_tar(folder / "s.tar", members(label="json", of=lambda n: b'{"label": [1]}')),
        ["--label-column", "label"],
        "label of 0.json is neither a number nor text",
    ),
    "a pattern with a gap": (
        lambda folder: write_tar(folder / "s-0.tar", PLAIN).with_name("s-{0..2}.tar"),
        [],
        "/s-1.tar; of images, give the folder",
    ),
    "elsewhere": (
        lambda _: Path("pipe:cat s.tar"),
        [],
        "source pipe:cat s.tar lies elsewhere: download it, and give the file or folder here",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_one_line_with_the_remedy(tmp_path, capsys, name):
    make, options, expected = REFUSED[name]
    path = make(tmp_path / "src")
    assert prepare(path, tmp_path / "out", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_what_is_not_read_in_place_is_named(tmp_path, capsys):
    write_tar(tmp_path / "below" / "a" / "s.tar", PLAIN)
    write_tar(tmp_path / "packed" / "s.tar.gz", PLAIN, "w:gz")
    for folder, file in (("below", "a/s.tar"), ("packed", "s.tar.gz")):
        assert prepare("--in-place", tmp_path / folder) == 2
        assert (
            f"holds no .tar shards; `mae-vit prepare {tmp_path / folder} OUT` reads {file}"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize("name", ["s-{000..009}.tar", "s-*.tar", "s-000.tar"])
def test_a_data_path_that_names_shards_is_told_to_name_their_folder(tmp_path, name):
    with pytest.raises(InputError, match="give the"):
        read_dataset(tmp_path / name)
    with pytest.raises(InputError, match="give the"):
        check_url(f"https://example.org/data/{name}")
    check_url("https://example.org/data.tar/folder")


def test_tars_behind_a_link_and_of_short_names(tmp_path):
    write_tar(tmp_path / "there" / "a.tar", PLAIN)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "linked").symlink_to(tmp_path / "there")
    assert prepare(tmp_path / "src", tmp_path / "out") == 0
    packed = bz2.compress((tmp_path / "there" / "a.tar").read_bytes())
    write_files(tmp_path / "packed", {"a.tbz2": packed})
    assert prepare(tmp_path / "packed", tmp_path / "out-packed") == 0
    assert labels(tmp_path / "out-packed") == labels(tmp_path / "out") != {}


def test_negative_labels_among_names_and_spellings_of_one_name(tmp_path):
    found = {"0": b"-1", "1": "Caf\u00e9".encode(), "2": "Cafe\u0301".encode()}
    write_tar(
        tmp_path / "a.tar",
        [
            (f"{n}.{kind}", IMAGES[0] if kind == "jpg" else label)
            for n, label in found.items()
            for kind in ("jpg", "cls")
        ],
    )
    assert prepare(tmp_path / "a.tar", tmp_path / "out") == 0
    dataset = read_dataset(tmp_path / "out")
    assert dataset.classes == ["Caf\u00e9"]
    assert dataset.splits["train"].class_counts == [2]
