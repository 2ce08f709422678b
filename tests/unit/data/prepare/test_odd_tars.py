"""Tars as people have them: shards, archives, one class each; what is not read is named, no label is lost unsaid."""

import io
import json
import math
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import webdataset as wds
from helpers.images import encoded, picture, write_files, write_tar

from mae_vit.core.errors import InputError
from mae_vit.core.urls import check_url
from mae_vit.data.shards.dataset_json import read_dataset

IMAGES = [encoded(picture(n, (8, 8))) for n in range(6)]
THREE = "train: 0 2, 1 2, 2 2"
GAPS = "train: 0 2, 1 2, - 2"


def members(image="jpg", label="cls", value=lambda n: b"%d" % (n % 3)):
    return [
        (f"{n}.{field}", data) for n in range(6) for field, data in ((image, IMAGES[n]), (label, value(n)))
    ]


PLAIN = members()
PAIRS = [(f"{n}.{side}.jpg", IMAGES[n]) for n in range(3) for side in ("input", "target")]
SMALL = [
    m for n in range(3) for m in ((f"{n}.jpg", IMAGES[n]), (f"{n}.s.jpg", IMAGES[3]), (f"{n}.cls", b"0"))
]
DOTS = [(f"cat.{n}.{kind}", data) for n in range(2) for kind, data in (("jpg", IMAGES[n]), ("txt", b"x"))]
WORDS = (b"bass, sea\n", b"10", b"(other)", b"2 cats", b"bass, sea", b"(other)")
CAFE = ("Café".encode(), "Cafe\u0301".encode(), b"-1")


def in_json(value):
    return members(label="json", value=lambda n: json.dumps(value(n)).encode())


# Members of a shard, options, and the classes of its images; 2 if it is refused.
SHARDS = {
    "plain": (PLAIN, "", THREE),
    "labels apart from their images": (PLAIN[::2] + PLAIN[1::2], "", THREE),
    "labels before images": (PLAIN[1::2] + PLAIN[::2], "", THREE),
    "dotted": (members("input.jpg"), "", THREE),
    "by first bytes": (members("image"), "", THREE),
    "by name": (members("image"), "--image-column image", THREE),
    "negative": (members(value=lambda n: b"%d" % (n - 1)), "", "train: 0 1, 1 1, 2 1, 3 1, 4 1, - 1"),
    "words": (members(value=lambda n: WORDS[n]), "", "train: (other) 2, 10 1, 2 cats 1, bass, sea 2"),
    "Unicode and negative": (members(value=lambda n: CAFE[n % 3]), "", "train: Café 4, - 2"),
    "json": (in_json(lambda n: {"caption": "a", "label": n % 3}), "", "train: - 6"),
    "json, asked": (in_json(lambda n: {"caption": "a", "label": n % 3}), "--label-column label", THREE),
    "numbers after dots": ([(f"img.{n}.jpg", IMAGES[n]) for n in range(4)], "", "train: - 4"),
    "small images": (SMALL, "", "train: 0 3"),
    "small images, asked": (SMALL, "--image-column s.jpg", "train: 0 3"),
    "pairs": (PAIRS, "", "train: - 6"),
    "no image": ([*PLAIN, ("a.heic", b"x"), ("a.cls", b"1"), ("b.mp4", b"x")], "", THREE),
    "no such label": (in_json(lambda n: {"kind": 1}), "--label-column label", 2),
    "json, 1.0": (in_json(lambda n: {"label": n % 3 + 0.0}), "--label-column label", THREE),
    "json, gaps": (in_json(lambda n: {"label": (0.0, 1.0, math.nan)[n % 3]}), "--label-column label", GAPS),
    "json, fractions": (in_json(lambda n: {"label": n % 3 + 0.5}), "--label-column label", 2),
    "a list in json": (in_json(lambda n: {"label": [1]}), "--label-column label", 2),
    "two images": ([*PAIRS, ("0.cls", b"0")], "", 2),
    "keys that end at a dot": (DOTS, "", 2),
    "an absolute name": ([("/home/me/cat/1.jpg", IMAGES[0])], "", 2),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards(tmp_path, call, said, name):
    content, options, expected = SHARDS[name]
    path = write_tar(tmp_path / "src" / "s-0.tar", content)
    result = call(path, options=options)
    said(result.text)
    assert (result.code, result.out.exists()) == ((2, False) if expected == 2 else (0, True))
    assert expected == 2 or result.counts() == expected
    if expected == THREE:
        # A folder is read as its only shard; images keep their key, bytes and label.
        folder = call(path.parent, options=options, out="folder")
        assert folder.images() == result.images()
        assert result.images() == {
            str(n): {"jpg": image, "cls": b"%d" % (n % 3)} for n, image in enumerate(IMAGES)
        }


@pytest.mark.parametrize(
    "label", [b"0,3", b"[0]", b"[1, 0, 0]", b"tensor(2)", b"0.5", b"0 3", b"\3\0\0\0", b'{"class": 1}']
)
def test_what_is_no_single_label_is_refused(tmp_path, call, label):
    path = write_tar(tmp_path / "s-0.tar", members(value=lambda n: label if n == 4 else b"1"))
    result = call(path)
    assert (result.code, len(result.text.splitlines())) == (2, 1)
    assert "label of 4" in result.text
    assert call(path, options="--no-labels").code == 0


@pytest.mark.parametrize(
    ("file", "mode"),
    [("a.tar.gz", "w:gz"), ("a.tgz", "w:gz"), ("a.tar.bz2", "w:bz2"), ("a.tar.xz", "w:xz"), ("a.tar", "w:gz"),
     ("S-0.TAR", "w"), ("a/b/s-0.tar", "w")],
)  # fmt: skip
def test_compressed_tars(tmp_path, call, file, mode):
    path = write_tar(tmp_path / "src" / file, PLAIN, mode)
    assert call(path).counts() == call(tmp_path / "src", out="folder").counts() == THREE
    # Nothing temporary is left.
    assert {path.name[:6] for path in (tmp_path / "out").iterdir()} == {"datase", "prepar", "train-"}


def test_webdatasets_own_writers(tmp_path, call):
    with wds.ShardWriter(str(tmp_path / "src-%06d.tar"), maxcount=4, verbose=0) as sink:
        for n, image in enumerate(IMAGES):
            sink.write({"__key__": f"{n}", "input.jpg": image, "cls": n % 3, "json": {"n": n}})
    assert call(tmp_path / "src-{000000..000001}.tar").counts() == THREE


@pytest.mark.parametrize("names", [("n01440764", "n01443537"), ("bolt", "test_tube")])
def test_tars_of_one_class_each(tmp_path, call, said, names):
    folder = tmp_path / "src"
    for name in names:
        write_tar(folder / f"{name}.tar", {f"{name}_{n}.JPEG": image for n, image in enumerate(IMAGES[:2])})
    with tarfile.open(tmp_path / "ILSVRC2012_img_train.tar", "w") as tar:
        tar.add(folder, "")
    for n, source in enumerate((folder, tmp_path / "ILSVRC2012_img_train.tar")):
        result = call(source, out=f"out{n}")
        assert result.counts() == f"train: {names[0]} 2, {names[1]} 2"
    said(result.text)
    assert call(folder, options="--no-labels").counts() == "train: - 4"
    said(call(folder, options="--in-place").text)


def test_several_tars(tmp_path, call):
    for number in range(2):
        write_tar(tmp_path / "src" / f"s-{number}.tar", [(f"{number}{name}", data) for name, data in PLAIN])
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(tmp_path / "src", "shards")
    assert call(tmp_path / "all.tar").counts() == "train: 0 4, 1 4, 2 4"
    for number, split in enumerate(("training", "validation")):
        classes = {f"{name}/{number}.jpg": IMAGES[number] for name in ("cat", "dog")}
        write_tar(tmp_path / "parts" / f"photos{number}.tar", classes)
        write_tar(tmp_path / "splits" / f"photos_{split}.tar", classes)
        write_tar(tmp_path / "deep" / ("train", "test")[number] / "a" / "000.tar", PLAIN)
    parts, splits = "train: cat 2, dog 2", "train: cat 1, dog 1 | val: cat 1, dog 1"
    assert call(*sorted((tmp_path / "parts").iterdir()), out="b").counts() == parts
    assert call(tmp_path / "splits", out="c").counts() == splits
    assert set(call(tmp_path / "deep", out="d").dataset.splits) == {"train", "test"}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "there").symlink_to(tmp_path / "src")
    assert call(tmp_path / "linked", out="e").counts() == "train: 0 4, 1 4, 2 4"


def test_pictures_beside_tars(tmp_path, call, said):
    write_tar(tmp_path / "src" / "s-0.tar", PLAIN)
    result = call({"example.jpg": IMAGES[0], "README.md": b"x"})
    said(result.text)
    assert result.counts() == THREE
    photos = {f"{c}/{n}.jpg": IMAGES[n] for c in ("cat", "dog") for n in range(2)}
    source = write_files(tmp_path / "photos", photos)
    write_tar(source / "annotations.tar", {"a.xml": b"x"})
    assert call(source, out="b").counts() == "train: cat 2, dog 2"
    write_tar(source / "s-0.tar", PLAIN)
    refused = call(source, out="c")
    said(refused.text)
    assert (refused.code, refused.out.exists()) == (2, False)


def gnu_tar(path: Path, folder: Path, *options: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["tar", *options, "-cf", str(path), "-C", str(folder), "."], check=True)
    return path


@pytest.mark.parametrize("kind", ["gnu", "pax", "pax --sparse-version=0.0", "pax --sparse-version=0.1"])
def test_sparse_members_are_refused(tmp_path, call, kind):
    folder = write_files(tmp_path / "photos", {"cat/1.jpg": IMAGES[0], "cat/hole.bmp": b"BM"})
    os.truncate(folder / "cat" / "hole.bmp", 1 << 20)
    path = gnu_tar(tmp_path / "src" / "a.tar", folder, "--sparse", *f"--format={kind}".split())
    for source, options in ((path, ""), (path.parent, ""), (path.parent, "--in-place")):
        result = call(source, options=options)
        assert result.code == 2
        assert "without --sparse" in result.text


@pytest.mark.parametrize("kind", ["v7", "ustar", "gnu", "pax"])
def test_links_in_an_archive_lead_to_its_files(tmp_path, call, kind):
    folder = write_files(tmp_path / "photos", {"cat/1.jpg": IMAGES[0], "dog/2.jpg": IMAGES[1]})
    os.link(folder / "cat" / "1.jpg", folder / "dog" / "hard.jpg")
    (folder / "dog" / "soft.jpg").symlink_to("../cat/1.jpg")
    (folder / "dog" / "out.jpg").symlink_to("/etc/passwd")
    result = call(gnu_tar(tmp_path / "a.tar", folder, f"--format={kind}"))
    images = result.images()
    assert set(images) == {"cat/1", "dog/2", "dog/hard", "dog/soft"}
    assert images["dog/hard"]["jpg"] == images["dog/soft"]["jpg"] == IMAGES[0]
    assert "skipped 1 " in result.text


def test_hidden_files_of_macos_are_no_samples(tmp_path, call):
    files = [(f"a/{dots}{name}", b"x" if dots else data) for name, data in PLAIN for dots in ("._", "")]
    path = write_tar(tmp_path / "src" / "s-0.tar", files)
    results = call(path), call(path.parent, options="--in-place")
    assert [result.counts() for result in results] == [THREE, THREE]
    assert "unreadable" not in results[0].text


def test_links_in_shards_are_followed_or_counted(tmp_path, call):
    with tarfile.open(write_tar(tmp_path / "s.tar", [*PLAIN, ("9.cls", b"1")]), "a") as tar:
        for name, target in (
            ("9.jpg", "0.jpg"),
            ("9.depth.png", "0.jpg"),
            ("10.jpg", "gone.jpg"),
            ("0.jpg", "0.jpg"),
        ):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, target
            tar.addfile(link)
        later = tarfile.TarInfo("11.jpg")
        later.size = len(IMAGES[1])
        tar.addfile(later, io.BytesIO(IMAGES[1]))
    result = call(tmp_path / "s.tar")
    images = result.images()
    assert images["9"] == {"jpg": IMAGES[0], "cls": b"1"}
    assert images.keys() == {*(name.partition(".")[0] for name, _ in PLAIN), "9", "11"}
    assert "skipped 2 " in result.text


def joined(folder: Path) -> Path:
    parts = (write_tar(folder / name, members()[:2]) for name in ("a.bin", "b.bin"))
    (folder / "s.tar").write_bytes(b"".join(part.read_bytes() for part in parts))
    return folder / "s.tar"


def inner_gzip(folder: Path) -> Path:
    stream = io.BytesIO(write_tar(folder / "x", PLAIN, "w:gz").read_bytes())
    return write_tar(folder / "s.tar", {"shard-0.tar.gz": stream.getvalue()})


REFUSED = {
    "joined by cat": joined,
    "zstd": lambda folder: write_files(folder, {"s.tar.zst": b"\x28\xb5\x2f\xfd" + bytes(20)}) / "s.tar.zst",
    "compressed inside": inner_gzip,
    "a zip among tars": lambda folder: write_tar(
        folder / "s.tar", {"a.tar": write_tar(folder / "x", PLAIN).read_bytes(), "b.ZIP": b"PK"}
    ),
    "a pattern with a gap": lambda folder: write_tar(folder / "s-0.tar", PLAIN).with_name("s-{0..2}.tar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_one_line_with_the_remedy(tmp_path, call, said, name):
    result = call(REFUSED[name](tmp_path / "src"))
    said(result.text)
    assert (result.code, len(result.text.splitlines()), result.out.exists()) == (2, 1, False)


@pytest.mark.parametrize("name", ["s-{000..009}.tar", "s-*.tar", "s-000.tar"])
def test_a_data_path_that_names_shards_is_told_to_name_their_folder(tmp_path, name):
    with pytest.raises(InputError, match="give the"):
        read_dataset(tmp_path / name)
    with pytest.raises(InputError, match="give the"):
        check_url(f"https://example.org/data/{name}")
    check_url("https://example.org/data.tar/folder")
