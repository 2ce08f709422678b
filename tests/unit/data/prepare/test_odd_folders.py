"""Folders, archives and files as people have them: what is taken, and what is said."""

import os

import numpy as np
import pytest
from helpers.images import encoded, picture, write_files, write_tar, write_zip
from unit.data.band_files import npz

JPEG, PNG, TIFF = encoded(picture(1)), encoded(picture(2), "png"), encoded(picture(2, mode="L"), "tiff")
HEIC = b"\0\0\0\x18ftypheic" + b"\0" * 200
TREE = {"cat/1.jpg": JPEG, "dog/2.jpg": JPEG}
TWO = "train: cat 1, dog 1"
PAGE = b"<!DOCTYPE html><html>Sign in"
MNIST = {
    f"raw/train-{what}-ubyte{end}": b"\0\0\x08\3"
    for what in ("images-idx3", "labels-idx1")
    for end in ("", ".gz")
}
STACKS = npz(train_images=np.zeros((4, 8, 8, 3), np.uint8), train_labels=np.zeros((4, 1), np.uint8))
TINY = {
    **{f"train/n0{n}/images/n0{n}_{m}.JPEG": JPEG for n in (1, 2) for m in range(3)},
    **{f"train/n0{n}/n0{n}_boxes.txt": f"n0{n}_0.JPEG\t0\t32".encode() for n in (1, 2)},
    **{f"val/images/val_{n}.JPEG": JPEG for n in range(4)},
    "val/val_annotations.txt": "\n".join(f"val_{n}.JPEG\tn0{1 + n // 3}\t0\t32" for n in range(4)).encode(),
    "test/images/test_0.JPEG": JPEG,
    "wnids.txt": b"n01\nn02",
}


def images(*paths, data=JPEG):
    return dict.fromkeys(paths, data)


# Files of a folder, options, and the classes of its images; 2 if it is refused.
FOLDERS = {
    "a class like a part": (images("query/1.jpg", "cat/1.jpg"), "--class-folder first", "train: cat 1, query 1"),
    "not decoded": (
        {**TREE, **images("cat/1.czi", "cat/2.CZI", "a.nii.gz", "b.xyz", "README", "c.txt", data=b"x"),
         **images("cat/3.HEIC", "dog/4.heic", "raw.NEF", data=HEIC), "e.zip": b"PK"}, "", TWO,
    ),
    "MNIST": (MNIST, "", 2),
    "MedMNIST": ({"pathmnist.npz": STACKS}, "", 2),
    "placeholders": ({**TREE, "cat/.2.jpg.icloud": b"bplist00"}, "", TWO),
    "pyramids": ({"1.tif": TIFF, "1.tif.ovr": TIFF, "1.tif.aux.xml": b"<PAMDataset>"}, "", "train: - 1"),
    "Sentinel-2": (images("p/S2A_1_B02.tif", "p/S2A_1_B8A.tif", "q/S2A_1_B02.tif", "q/S2A_1_B8A.tif", data=TIFF), "",
                   "train: p 2, q 2"),
    "MicaSense": (images(*(f"000/IMG_000{shot}_{n}.tif" for shot in "012" for n in "12345"), data=TIFF), "",
                  "train: 000 15"),
    "slices of patients": (images(*(f"P{of}/P{of}_{n}.tif" for of in "12" for n in "12"), data=TIFF), "",
                           "train: P1 2, P2 2"),
    "Opera": (images("r01c01-ch1sk1fk1fl1.tif", "r01c01-ch2sk1fk1fl1.tif", data=TIFF), "", "train: - 2"),
    "BBBC021": (images(*(f"D_w{n}{n}2A24E4B-1CFE-1F52-E000-000000000000.tif" for n in "12"), data=TIFF), "",
                "train: - 2"),
    "wells": (images("plate_C01.tif", "plate_C02.tif", data=TIFF), "", "train: - 2"),
    "two formats": (images("a/1.jpg", "a/1.png", "b/2.jpg", "b/2.png"), "", "train: a 2, b 2"),
    "classes in names": (
        {**images(*(f"train/{name}.{n}.jpg" for name in ("cat", "dog") for n in "01")),
         "sample_submission.csv": b"id,label"}, "", "train: - 4",
    ),
    "a table beside classes of no names": (
        {**images("patient1/a.jpg", "patient2/a.jpg"), "labels.csv": b"path,label"}, "", 2,
    ),
    "names that tell nothing": (
        {**TREE, "eel/IMG_1": JPEG, "eel/IMG_2": PNG, "fox/3.JFIF": JPEG, "gnu/4.jpe": JPEG, "hen/5.dat": PNG,
         "notes.bin": b"\0" * 300}, "", f"{TWO}, eel 2, fox 1, gnu 1, hen 1",
    ),
    "classes without an image": ({**TREE, "eel/1.psd": b"8BPS", "fox/1.heic": HEIC, "gnu/1.txt": b"x"}, "", TWO),
    "not an image": (
        {**TREE, "cat/a.jpg": HEIC, "cat/e.jpg": b"", "cat/b.jpg": b"\n<!DOCTYPE html><html>404", "cat/c.jpg": b"hello",
         "cat/d.jpg": b"version https://git-lfs.github.com/spec/v1\n"}, "", TWO,
    ),
    "what systems leave": (
        {**TREE, **images("cat/._1.jpg", "__MACOSX/cat/1.jpg", ".thumbnails/cat/1.jpg", "cat/@eaDir/1.jpg/S_M.jpg"),
         "cat/Thumbs.db": b"x", ".DS_Store": b"x"}, "", TWO,
    ),
    "labels in a table": ({"1.jpg": JPEG, "labels.csv": b"1.jpg,cat\n"}, "", "train: - 1"),
    "labels in a table beside a folder": ({"Bilder/1.jpg": JPEG, "labels.csv": b"1.jpg,cat\n"}, "", "train: Bilder 1"),
    "photographs beside their raw files": ({"1.jpg": JPEG, "1.heic": HEIC, "1.NEF": HEIC}, "", "train: - 1"),
    "tiny-imagenet": (TINY, "", "test: - 1 | train: n01 3, n02 3 | val: n01 3, n02 1"),
    "classes of the test": (
        images("train/cat/1.jpg", "train/Dog/1.jpg", "test/dog/1.jpg"), "", "test: dog 1 | train: Dog 1, cat 1",
    ),
    "one class": (images("all/1.jpg", "all/2.jpg"), "", "train: all 2"),
    "a copy in itself": (
        images(*(f"chest/{again}{s}/{path}" for again in ("", "chest/") for s in ("train", "test") for path in TREE)),
        "", "test: cat 1, dog 1 | train: cat 1, dog 1",
    ),
    "a copy of all": ({**TREE, **images("x/cat/1.jpg", "x/dog/2.jpg")}, "--class-folder first", TWO),
    "no copy, since bytes differ": ({**TREE, **images("x/cat/1.jpg", "x/dog/2.jpg", data=PNG)}, "--class-folder first",
                                    f"{TWO}, x 2"),
    "a copy of a part": ({**TREE, **images("x/cat/1.jpg")}, "--class-folder last", "train: cat 2, dog 1"),
    "a part of the images as a test": (images("1.jpg", "2.jpg", "test/1.jpg"), "", "test: - 1 | train: - 2"),
    "a whole archive": ({**TREE, "notes.tar.gz": b"\x1f\x8b"}, "", TWO),
    "parts of archives": ({**TREE, **images("a.tar.gz.partaa", "b.zip.001", "c.z01", "d.tar.aa", "e.xyz", data=b"PK")},
                          "", TWO),
    "some in no class folder": (images("cat/1.png", "2.png"), "", 2),
    "no readable image": ({"1.jpg": b"text"}, "", 2),
    "an escape": ({"cat/\x1b[2J\n.png": b"no image", "cat/1.png": PNG, "dog/\x1b]0;x\x07.png": PNG}, "",
                  "train: cat 1, dog 1"),
    "keys of metadata": (images("__meta__/a.b.png", "cat/a_b.png", "cat/a.b.png", data=PNG), "",
                         "train: __meta__ 1, cat 2"),
    "Unicode in two forms": (images("train/Caf\u00e9/1.jpg", "test/Cafe\u0301/2.jpg"), "",
                             "test: Café 1 | train: Café 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(call, said, name):
    files, options, expected = FOLDERS[name]
    result = call(files, options=options)
    said(result.text)
    assert result.code == (2 if expected == 2 else 0)
    assert expected == 2 or result.counts() == expected


@pytest.mark.parametrize("pack", [write_tar, write_zip])
@pytest.mark.parametrize("name", ["names that tell nothing", "a copy in itself"])
def test_archives_are_read_as_their_folders(tmp_path, call, name, pack):
    files, _, expected = FOLDERS[name]
    folder, archive = call(files), call(pack(tmp_path / f"src.{pack.__name__[6:]}", files), out="b")
    assert archive.counts() == folder.counts() == expected
    assert archive.images() == folder.images()
    assert archive.text.replace(str(archive.out), str(folder.out)) == folder.text


# Folders that may be no classes: benchmarks' parts, years, patients, letters and numbers of tiles and hashes.
UNCLEAR = [
    "bounding_box_train bounding_box_test query gt_bbox",
    "train query gallery",
    "leftImg8bit/train/aachen leftImg8bit/val/ulm gtFine/train/aachen gtFine/val/ulm",
    "Photos from 2019, Photos from 2020, Rome, Trash",
    "p/originals/0 p/originals/A p/resources/derivatives/0",
    "patient00001/study1 patient00002/study1 patient00002/study2",
    "imagesc/c/e imagesr/r/g",
    "2/0/2/202cd.jpg 6/e/1/6e158.jpg",
    "14/8801/5373.png 15/17602/10746.png",
]


@pytest.mark.parametrize("paths", UNCLEAR)
def test_folders_that_may_be_no_classes_are_a_question(call, paths):
    named = enumerate(paths.split(", " if "," in paths else None))
    files = images(*(path if "." in path else f"{path}/{n}.jpg" for n, path in named))
    result = call(files)
    assert result.code == 2
    assert "--class-folder first" in result.text
    assert not result.out.exists()
    assert call(files, options="--no-labels").code == 0


def test_links(tmp_path, call, said):
    source = write_files(tmp_path / "src", {f"train/{path}": data for path, data in TREE.items()})
    (source / "val").symlink_to("train")
    (source / "test").symlink_to(tmp_path / "nowhere")
    os.mkfifo(source / "train" / "cat" / "pipe.png")
    (source / "train" / "cat" / "zero.png").symlink_to("/dev/zero")
    (source / "train" / "cat" / "itself.png").symlink_to("itself.png")
    (source / "train" / "dog" / "loop").symlink_to(source)
    (source / "train" / "cat" / "more").symlink_to(write_files(tmp_path / "there", {"3.jpg": JPEG}))
    result = call(source)
    said(result.text)
    assert result.counts() == "train: cat 2, dog 1"


def gbk(path):
    """A zip of a Chinese Windows: names in GBK, and no flag that says so."""
    write_zip(path, {"XXXX/1.jpg": JPEG, "dog/2.jpg": JPEG})
    path.write_bytes(path.read_bytes().replace(b"XXXX", "猫科".encode("gbk")))
    return path


def test_names_in_other_encodings(tmp_path, call, said):
    refused = call(gbk(tmp_path / "a.zip"))
    said(refused.text)
    assert refused.code == 2
    write_tar(tmp_path / "a.tar", {"猫科/1.jpg": JPEG, "dog/2.jpg": JPEG}, format=1, encoding="gbk")
    assert call(tmp_path / "a.tar").code == 2
    path = write_zip(tmp_path / "mac.zip", {"XXXXX/1.jpg": JPEG, "dog/YY.jpg": JPEG})
    data = path.read_bytes().replace(b"XXXXX", "Café".encode())
    path.write_bytes(data.replace(b"YY", "猫".encode("cp932")))
    result = call(path, out="c")
    said(result.text)
    assert result.counts() == "train: Café 1, dog 1"


def test_files_that_are_no_source(tmp_path, call, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = {
        **images("x.tar", "x.zip", "x.parquet", "x.jpg", data=PAGE),
        **images("a.zip.001", "a.z01", "a.tar.aa", "pathmnist.npz", "train-images-idx3-ubyte.gz", data=b"PK"),
        **images("cats.rar", "list.txt", "labels.json", data=b"cat/1.jpg"),
        "empty.zip": b"",
        "cut.zip": b"PK\3\4 and no more",
    }
    write_files(tmp_path, contents)
    write_tar(tmp_path / "cifar-10-python.tar.gz", {"data_batch_1": b"x"})
    write_zip(tmp_path / "all.zip", {"train.zip": b"PK", "test.zip": b"PK"})
    for name in (*contents, "cifar-10-python.tar.gz", "all.zip", "photos/*.jpg", "photos{", "pipe:cat s.tar"):
        result = call(name)
        said(result.text)
        assert (result.code, len(result.text.splitlines())) == (2, 1)


def test_the_pictures_of_a_run_are_no_images(call, said):
    result = call(
        images("pictures/step_1.png", data=PAGE) | {"config.yaml": b"run: {}", "environment.json": b"{}"}
    )
    said(result.text)
    assert result.code == 2


def test_the_parts_of_a_download_are_one_folder(tmp_path, call, said):
    parts = [
        write_zip(tmp_path / f"photos-00{n}.zip", {f"photos/{path}": JPEG}) for n, path in enumerate(TREE)
    ]
    assert call(*parts).counts() == TWO
    other = write_zip(tmp_path / "more.zip", {"photos/cat/9.jpg": JPEG, "photos/dog/9.jpg": JPEG})
    assert call(parts[0], other, out="b").counts() == "train: cat 2, dog 1"
    refused = call(parts[0], parts[0], out="c")
    said(refused.text)
    assert refused.code == 2


def test_the_name_of_a_source_is_its_split_or_class(tmp_path, call, said):
    packed = write_tar(tmp_path / "train.tar.gz", TREE, "w:gz"), write_zip(tmp_path / "test.zip", TREE)
    two = "test: cat 1, dog 1"
    assert (call(*packed).counts(), call(packed[1], out="b").counts()) == (f"{two} | {TWO}", two)
    cat, dog = (write_zip(tmp_path / f"{name}.zip", {"1.jpg": JPEG}) for name in ("cat", "dog"))
    assert call(cat, dog, out="c").counts() == TWO
    years = [write_tar(tmp_path / f"{name}.tar", {f"{name}/2019/1.jpg": JPEG}) for name in ("cat", "dog")]
    assert call(*years, out="y").counts() == TWO
    of_years = [
        write_zip(tmp_path / f"{n}.zip", {f"{n}/{p}": JPEG for p in TREE}) for n in ("train2017", "val2017")
    ]
    assert call(*of_years, out="z").counts() == f"{TWO} | val: cat 1, dog 1"
    assert call(write_zip(tmp_path / "photos-dev.zip", TREE), out="p").counts() == TWO
    more = [write_zip(tmp_path / f"{name}.zip", TREE) for name in ("photos", "more")]
    assert call(*more, out="d").code == 2, "are their names classes, or their folders?"
    folder = write_files(tmp_path / "Valid", TREE)
    for options in ("", "", "--split val"):
        said(call(folder, options=options, out="e").text)
    other = write_zip(tmp_path / "unlabeled.zip", {"1.jpg": PNG})
    assert call(folder, options=f"--unlabeled {other}", out="f").counts() == f"{TWO}, - 1"
    other = write_zip(tmp_path / "test.zip", {"1.jpg": PNG})
    assert call(folder, options=f"--unlabeled {other}", out="g").counts() == f"{TWO}, - 1"
    arrays = write_files(tmp_path / "arrays", {"dataset.json": b"{}"})
    np.save(arrays / "1.npy", np.zeros((8, 8, 2), np.uint8))
    assert call(arrays, out="h").code == 0


def test_a_picture_beside_the_classes_of_an_archive_is_a_question(tmp_path, call):
    files = {**{f"repo/data/{path}": data for path, data in TREE.items()}, "repo/logo.jpg": JPEG}
    for pack in (write_tar, write_zip):
        assert call(pack(tmp_path / f"a.{pack.__name__[6:]}", files)).code == 2


def test_a_folder_of_a_name_that_is_not_in_utf_8(tmp_path, call, said):
    for folder in (b"/src/caf\xe9", b"/flat\xe9"):
        os.makedirs(os.fsencode(tmp_path) + folder)
        with open(os.fsencode(tmp_path) + folder + b"/caf\xe9.png", "wb") as file:
            file.write(PNG)
    refused = call(tmp_path / "src")
    said(refused.text)
    assert refused.code == 2
    result = call(os.fsdecode(os.fsencode(tmp_path) + b"/flat\xe9"))
    assert result.images() == {r"caf\xe9": {"png": PNG}}
    assert result.dataset.splits["train"].source == r"flat\xe9"
