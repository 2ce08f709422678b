"""Files as people have them: names in other encodings, images by other names, what lies beside images."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers.images import encoded, picture, read_back, write_files, write_pairs, write_tar, write_zip
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset

JPEG, PNG = encoded(picture(1)), encoded(picture(2), "png")
HEIC = b"\0\0\0\x18ftypheic" + b"\0" * 200
TREE = {"cat/1.jpg": JPEG, "dog/2.jpg": JPEG}


@pytest.fixture
def prepared(tmp_path, capsys):
    """Prepares files as a user would: (exit code, what was printed, the data set)."""

    def run(source: Path | dict[str, bytes], *options: object):
        if isinstance(source, dict):
            source = write_files(tmp_path / "src", source)
        code = main(["prepare", str(source), str(tmp_path / "out"), *map(str, options)])
        said = "".join(capsys.readouterr())
        return code, said, read_dataset(tmp_path / "out") if code == 0 else None

    return run


def gbk_zip(path: Path) -> Path:
    """A zip of a Chinese Windows: names in GBK, and no flag that says so."""
    write_zip(path, {"XXXX/1.jpg": JPEG, "dog/2.jpg": JPEG})
    path.write_bytes(path.read_bytes().replace(b"XXXX", "猫科".encode("gbk")))
    return path


def gbk_tar(path: Path) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="gbk") as tar:
        for name in ("猫科/1.jpg", "dog/2.jpg"):
            member = tarfile.TarInfo(name)
            member.size = len(JPEG)
            tar.addfile(member, io.BytesIO(JPEG))
    return path


@pytest.mark.parametrize("pack", [gbk_zip, gbk_tar])
def test_archives_whose_names_are_not_in_utf_8_ask_for_the_encoding(tmp_path, prepared, pack):
    archive = pack(tmp_path / f"cats.{pack.__name__[4:]}")
    code, said, _ = prepared(archive)
    assert code == 2
    assert "is not named in UTF-8: name the encoding of an archive (--name-encoding gbk, cp932" in said
    code, said, dataset = prepared(archive, "--name-encoding", "gbk")
    assert code == 0
    assert dataset.classes == ["dog", "猫科"]


def test_a_zip_in_utf_8_without_the_flag_is_read(tmp_path, prepared):
    path = write_zip(tmp_path / "mac.zip", {"XXXXX/1.jpg": JPEG, "dog/2.jpg": JPEG})
    path.write_bytes(path.read_bytes().replace(b"XXXXX", "Café".encode()))
    assert prepared(path)[2].classes == ["Café", "dog"]


def test_file_names_in_another_encoding_are_noted(tmp_path, prepared):
    path = write_zip(tmp_path / "a.zip", {"cat/XX.jpg": JPEG, "dog/2.jpg": JPEG})
    path.write_bytes(path.read_bytes().replace(b"XX", "猫".encode("cp932")))
    code, said, _ = prepared(path)
    assert code == 0
    assert r"names such as cat/\x94L.jpg are not in UTF-8" in said
    assert prepared(path, "--name-encoding", "klingon")[1].count("no encoding; usual ones are gbk") == 1


@pytest.mark.parametrize("pack", [write_files, write_tar, write_zip])
def test_images_are_known_by_their_first_bytes(tmp_path, prepared, pack):
    files = TREE | {
        "eel/IMG_0001": JPEG,
        "eel/IMG_0002": PNG,
        "fox/3.JFIF": JPEG,
        "gnu/4.jpe": JPEG,
        "hen/5.dat": PNG,
    }
    files |= {"notes.bin": b"\0" * 300}
    code, said, dataset = prepared(pack(tmp_path / f"a.{pack.__name__[6:]}", files))
    assert code == 0
    assert dataset.classes == ["cat", "dog", "eel", "fox", "gnu", "hen"]
    assert (
        "took 3 images by the first bytes, since the names do not tell: eel/IMG_0001, eel/IMG_0002, " in said
    )
    assert "named as another format" not in said
    samples = read_back(tmp_path / "out")
    assert samples["eel/IMG_0002"] == {"png": PNG, "cls": b"2"}
    assert samples["fox/3"] == {"jpg": JPEG, "cls": b"3"}


def test_a_class_that_disappears_is_named(prepared):
    code, said, dataset = prepared(
        TREE | {"eel/1.psd": b"8BPS", "fox/1.heic": HEIC, "gnu/deep/1.txt": b"x", "README.md": b"x"}
    )
    assert (code, dataset.classes) == (0, ["cat", "dog"])
    assert "3 folders beside the classes without a readable image, so no class: eel, fox, gnu" in said


NOT_READ = {
    "a HEIC photograph": (
        HEIC,
        "cat/x.jpg: a photograph in the format HEIC, which cannot be read: convert it",
    ),
    "an empty file": (b"", "cat/x.jpg: an empty file"),
    "a web page": (b"\n<!DOCTYPE html><html>404", "cat/x.jpg: a web page: the download failed"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull fetches"),
    "text": (b"hello", "cat/x.jpg: not an image"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_named_as_an_image_and_is_none_is_named(prepared, name):
    content, expected = NOT_READ[name]
    code, said, _ = prepared(TREE | {"cat/x.jpg": content})
    assert code == 0
    assert expected in said


def test_what_systems_leave_in_folders_is_no_image(tmp_path, prepared):
    left = (
        "cat/._1.jpg",
        "__MACOSX/cat/._1.jpg",
        "__MACOSX/cat/1.jpg",
        ".thumbnails/cat/1.jpg",
        "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg",
    )
    code, said, dataset = prepared(
        TREE | dict.fromkeys(left, JPEG) | {"cat/Thumbs.db": b"x", ".DS_Store": b"x"}
    )
    assert (code, dataset.splits["train"].samples) == (0, 2)
    assert "ignored 7 files (no images)" in said


REFUSED = {
    "rar": (
        "cats.rar",
        "cats.rar: neither a folder nor an archive (.tar, .tar.gz, .tar.bz2, .tar.xz, .zip); unpack it first",
    ),
    "a pattern": (
        "photos/*.jpg",
        "source photos/*.jpg: no file is called photos/*.jpg; of images, give the folder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sources_that_are_none_name_the_way(tmp_path, monkeypatch, prepared, name):
    monkeypatch.chdir(tmp_path)
    Path("cats.rar").write_bytes(b"Rar!\x1a\7\0")
    spec, expected = REFUSED[name]
    code, said, _ = prepared(Path(spec))
    assert code == 2
    assert expected in said.splitlines()[-1]


def test_archives_in_an_archive_and_tables_are_named(tmp_path, prepared):
    code, said, _ = prepared(write_zip(tmp_path / "all.zip", {"train.zip": b"PK", "test.zip": b"PK"}))
    assert code == 2
    assert "left out 2 archives (train.zip, test.zip): unpack first" in said
    code, said, _ = prepared({"1.jpg": JPEG, "labels.csv": b"1.jpg,cat\n"})
    assert code == 0
    assert "labels.csv may hold labels" in said
    assert "is a source itself: give it in place of the folder" in said
    said = prepared({"labels/a.csv": b"1.jpg,cat\n"}, "--overwrite")[1]
    assert "is a source itself: move it to the folder that holds its images, and give it in" in said


def test_classes_that_only_the_test_has_are_named(prepared):
    files = {
        f"{split}/{name}/1.jpg": JPEG for split, name in (("train", "cat"), ("train", "Dog"), ("test", "dog"))
    }
    code, said, _ = prepared(files)
    assert code == 0
    assert '"Dog" and "dog" differ only in case' in said
    assert (
        "test has images of 1 class that train lacks (dog): no model trained on it can get them right" in said
    )
    assert "1 class of 3 without an image in it: dog" in said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lists_are_read_as_editors_save_them(tmp_path, prepared, encoding):
    chosen = tmp_path / "list.txt"
    chosen.write_text("cat/1.jpg\r\ndog/2.jpg\r\n", encoding=encoding)
    assert prepared(TREE, "--subset", chosen)[0] == 0
    pairs = write_pairs(tmp_path / "pairs", count=2)
    (pairs / "classes.txt").write_text("ground\nsky\nsea\n", encoding=encoding)
    options = ("--masks", pairs / "masks", "--mask-classes", pairs / "classes.txt", "--overwrite")
    assert prepared(pairs / "images", *options)[2].segmentation.classes == ["ground", "sky", "sea"]


def test_masks_of_0_and_255_are_no_silent_loss(tmp_path, prepared):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    mask = np.zeros((8, 8), np.uint8)
    mask[:4] = 255
    Image.fromarray(mask).save(tmp_path / "masks" / "1.png")
    Image.fromarray(mask).save(tmp_path / "images" / "1.png")
    classes = tmp_path / "classes.txt"
    classes.write_text("ground\nobject\n")
    options = ("--masks", tmp_path / "masks", "--mask-classes", classes)
    code, said, _ = prepared(tmp_path / "images", *options)
    assert code == 0
    assert (
        "have the id 0 or the id 255, which does not count: if 255 is an object, give --mask-ignore 254"
        in said
    )
    classes.write_text("0: ground\n255: object\n")
    code, said, dataset = prepared(tmp_path / "images", *options, "--mask-ignore", "254", "--overwrite")
    assert "warning" not in said
    assert dataset.splits["train"].masks.shares == [0.5, 0.5]
    assert dataset.segmentation.ids == [0, 255]
