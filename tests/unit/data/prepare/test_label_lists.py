"""Lists of labels beside images that lie in no class folder: they are read where they name known classes, or said."""

import pytest
from helpers.images import encoded, picture, write_files, write_tar, write_zip

from mae_vit.cli.main import main
from mae_vit.data.prepare.label_lists import Names, labels_beside
from mae_vit.data.shards.dataset_json import read_dataset

JPEG = encoded(picture(1))
# As tiny-imagenet-200 has them.
TREE = {
    **{f"train/n0{n}/images/n0{n}_{m}.JPEG": JPEG for n in (1, 2) for m in range(3)},
    **{f"train/n0{n}/n0{n}_boxes.txt": f"n0{n}_0.JPEG\t0\t32".encode() for n in (1, 2)},
    **{f"val/images/val_{n}.JPEG": JPEG for n in range(4)},
    "val/val_annotations.txt": "\n".join(f"val_{n}.JPEG\tn0{1 + n // 3}\t0\t32" for n in range(4)).encode(),
    "test/images/test_0.JPEG": JPEG,
    "wnids.txt": b"n01\nn02",
}


@pytest.mark.parametrize("pack", [write_files, write_tar, write_zip])
def test_the_list_of_tiny_imagenets_val_is_read(tmp_path, capsys, pack):
    source = pack(tmp_path / f"tiny.{pack.__name__[6:]}", TREE)
    assert main(["prepare", str(source), str(tmp_path / "out"), "--workers", "0"]) == 0
    splits = read_dataset(tmp_path / "out").splits
    assert {name: split.class_counts for name, split in splits.items()} == {
        "test": [0, 0], "train": [3, 3], "val": [3, 1]
    }  # fmt: skip
    said = capsys.readouterr().out
    assert (
        "took the labels of 4 images from val/val_annotations.txt, which names classes of the others\n"
        in said
    )


READ = {"a/1.jpg": "cat", "a/2.jpg": "dog"}


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("1.jpg,cat\n2.jpg,dog", "a/x.csv", READ),
        ("Image Id,Kind of animal\n1,cat\n2,dog", "a/x.csv", READ),
        ("box;label;image\n0;cat;a/1.jpg\n0;dog;a/2.jpg\n1;dog;a/2.jpg", "x.csv", READ),
        ("1.jpg cat\n2.jpg dog", "a/x.txt", READ),
        # No column has one class of each image.
        ("1.jpg,0\n2.jpg,1", "a/x.csv", {}),
        ("1.jpg,cat\n2.jpg,cat", "a/x.csv", {}),
        ("1.jpg,cat\n2.jpg,dog\n2.jpg,cat", "a/x.csv", {}),
    ],
)
def test_a_column_of_known_classes_is_read_and_another_list_is_said(text, name, told):
    found, notes = labels_beside(["a/1.jpg", "a/2.jpg"], {"cat", "dog"}, [(name, text.encode)])
    assert found == told
    (note,) = notes
    said = f"took the labels of 2 images from {name}, which names classes of the others"
    assert note.startswith(
        said if told else f"{name} lists 2 images without a label, but no column has a class"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("1.jpg,cat\n2.jpg,dog", "a/sample_submission.csv"),
        ("1.jpg,cat\n2.jpg,dog", "b/x.csv"),
        ("a cat on a mat", "a/1.txt"),
        ("", "a/x.csv"),
        ("\xff", "a/x.csv"),
    ],
)
def test_other_texts_are_not_read(text, name):
    assert labels_beside(
        ["a/1.jpg", "a/2.jpg"], {"cat", "dog"}, [(name, lambda: text.encode("latin-1"))]
    ) == ({}, [])


def test_names_are_ends_of_paths():
    names = Names(["a/1.jpg", "b/1.jpg", "1.png", "b/2.v1.JPG"])
    found = {name: names.find(name) for name in ("1", "1.png", "a\\1.jpg", "./b/1", "2.v1", "2", ".jpg", "")}
    assert found == {
        "1": None, "1.png": "1.png", "a\\1.jpg": "a/1.jpg", "./b/1": "b/1.jpg", "2.v1": "b/2.v1.JPG",
        "2": None, ".jpg": None, "": None,
    }  # fmt: skip
