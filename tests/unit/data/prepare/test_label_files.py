"""`prepare --labels`: labels from a table, as people have them; `--unlabeled` images; the contact sheet."""

import json

import numpy as np
import pytest
from helpers.images import encoded, picture, read_back, write_files, write_tar, write_zip
from PIL import Image

from mae_vit.cli.main import main

PHOTOS = {
    f"{folder}/{n}.jpg": encoded(picture(10 * k + n)) for k, folder in enumerate("ab") for n in range(4)
}
ROWS = [("a/0.jpg", "cat"), ("a/1.jpg", "dog"), ("b/0.jpg", "cat"), ("b/1.jpg", "dog")]


@pytest.fixture
def labels_of(tmp_path, capsys):
    """Prepares a folder of eight photographs with a label file; returns the class of each image by its key."""
    write_files(tmp_path / "photos", PHOTOS)

    def prepare(table: str | bytes, *options: str, source="photos") -> dict[str, str]:
        content = table if isinstance(table, bytes) else table.encode()
        (tmp_path / "labels.csv").write_bytes(content)
        words = [tmp_path / source, tmp_path / "out", "--labels", tmp_path / "labels.csv", *options]
        assert main(["prepare", *map(str, words), "--overwrite"]) == 0
        classes = json.loads((tmp_path / "out" / "dataset.json").read_text())["classes"]
        fields = read_back(tmp_path / "out").items()
        return {key: classes[int(files["cls"])] for key, files in fields if "cls" in files}

    prepare.said = lambda: capsys.readouterr().out
    return prepare


EXPECTED = {path.removesuffix(".jpg"): label for path, label in ROWS}


@pytest.mark.parametrize(
    "table",
    [
        "image,label\n" + "".join(f"{path},{label}\n" for path, label in ROWS),
        # By order, without a line of names.
        "".join(f"{path},{label}\n" for path, label in ROWS),
        "".join(f"{label};{path.removesuffix('.jpg')}\n" for path, label in ROWS),
        # As Excel saves it: a byte order mark, CRLF, other names and letter case.
        b"\xef\xbb\xbf" + "".join(f"{a};{b}\r\n" for a, b in [("Photo", "Diagnosis"), *ROWS]).encode(),
        ("id\tfile\tclass\n" + "".join(f"{n}\t{p}\t{label}\n" for n, (p, label) in enumerate(ROWS))).encode("utf-16"),
        # Two columns of the same images.
        "id,name,label\n" + "".join(f"{p.removesuffix('.jpg')},{p},{label}\n" for p, label in ROWS),
        # Paths of another machine.
        "path,label\n" + "".join(f"C:\\Users\\me\\photos\\{p},{label}\n".replace("/", "\\") for p, label in ROWS),
        "file,cat,dog\n" + "".join(f"{p},{int(label == 'cat')},{int(label == 'dog')}\n" for p, label in ROWS),
    ],
)  # fmt: skip
def test_labels_are_found_in_every_usual_form(labels_of, table):
    assert labels_of(table) == EXPECTED
    assert "4 images without a label" in labels_of.said()


def test_a_table_of_images_alone_lacks_labels(labels_of, tmp_path, capsys):
    (tmp_path / "labels.csv").write_text("image\n" + "".join(f"{path}\n" for path, _ in ROWS))
    words = [tmp_path / "photos", tmp_path / "out", "--labels", tmp_path / "labels.csv"]
    assert main(["prepare", *map(str, words)]) == 2
    assert "column of labels" in capsys.readouterr().err


def test_a_label_file_silences_advice_on_other_labels(labels_of, tmp_path):
    """Names that may hold classes, and a table beside the images."""
    photos = {f"{name}_{n}.jpg": encoded(picture(n)) for n in range(3) for name in ("cat", "dog")}
    write_files(tmp_path / "flat", {**photos, "labels.csv": b"path,label"})
    labels_of("image,label\ncat_1.jpg,1\ndog_1.jpg,2\n", source="flat")
    text = labels_of.said()
    assert "cat, dog" not in text
    assert "CLASS" not in text


def test_columns_are_chosen_by_name_or_number(labels_of, tmp_path):
    table = "name,age,kind\n" + "".join(f"{path},7,{label}\n" for path, label in ROWS)
    assert labels_of(table, "--label-column", "kind") == EXPECTED
    assert labels_of(table, "--image-column", "1", "--label-column", "3") == EXPECTED
    assert (
        main(
            [
                "prepare",
                str(tmp_path / "photos"),
                str(tmp_path / "o"),
                "--labels",
                str(tmp_path / "labels.csv"),
            ]
        )
        == 2
    )


def test_unknown_and_missing_images_are_counted_and_named(labels_of, said):
    labels_of("image,label\ngone.jpg,cat\n" + "".join(f"{path},{label}\n" for path, label in ROWS))
    said(labels_of.said().rpartition("\n/")[0])


def test_an_archive_and_a_column_of_splits(labels_of, tmp_path):
    write_zip(tmp_path / "photos.zip", PHOTOS)
    table = "image,label,split\n" + "".join(
        f"{path},{label},{'val' * (n < 2)}\n" for n, (path, label) in enumerate(ROWS)
    )
    assert labels_of(table, source="photos.zip") == {"b/0": "cat", "b/1": "dog"}
    assert sorted(read_back(tmp_path / "out", "val")) == ["a/0", "a/1"]


def test_labels_of_held_out_images_alone(labels_of, tmp_path):
    assert labels_of("image,label,split\n" + "".join(f"{p},{c},val\n" for p, c in ROWS)) == {}
    assert len(read_back(tmp_path / "out")) == len(read_back(tmp_path / "out", "val")) == 4


def test_numbers_are_classes_in_numeric_order(labels_of, tmp_path):
    rows = zip([path for path, _ in ROWS], ["10.0", "9.0", "9.0", "-1"], strict=True)
    assert labels_of("image,label\n" + "".join(f"{p},{n}\n" for p, n in rows)) == {
        "a/0": "10",
        "a/1": "9",
        "b/0": "9",
    }
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["classes"] == ["9", "10"]


@pytest.mark.parametrize(
    "table",
    [
        "image,label\na/0.jpg,cat|dog\na/1.jpg,cat\n",
        "image,label\na/0.jpg,cat\na/0.jpg,dog\n",
        "image,cat,dog\na/0.jpg,1,1\na/1.jpg,0,1\n",
        "image,age\na/0.jpg,34.5\na/1.jpg,20\n",
        "image,label\nx.jpg,cat\ny.jpg,dog\n",
        "image,kind,age\na/0.jpg,cat,3\n",
        "",
    ],
    ids=["joined", "again", "several ones", "numbers", "no image", "two columns", "empty"],
)
def test_what_is_no_class_of_an_image_is_one_line(labels_of, tmp_path, capsys, said, table):
    (tmp_path / "labels.csv").write_text(table)
    words = [tmp_path / "photos", tmp_path / "out", "--labels", tmp_path / "labels.csv"]
    assert main(["prepare", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said(line)
    assert not (tmp_path / "out").exists()


def test_a_holdout_is_drawn_from_labeled_images(labels_of, tmp_path):
    write_files(
        tmp_path / "more",
        {f"{n}.jpg": encoded(picture(100 + n)) for n in range(20)} | {"same.jpg": PHOTOS["a/0.jpg"]},
    )
    table = "".join(f"{path},{label}\n" for path, label in ROWS)
    labeled = labels_of(table, "--holdout", "1/2", "--unlabeled", str(tmp_path / "more"))
    held_out = read_back(tmp_path / "out", "val")
    assert len(labeled) == len(held_out) == 2
    assert all("cls" in files for files in held_out.values())
    # Two with labels, four that the table does not name, and twenty: a copy of a labeled image is left out.
    assert len(read_back(tmp_path / "out")) == 26
    assert "left out 1 image" in labels_of.said()


def test_a_folder_around_the_labeled_one_adds_the_others(tmp_path, capsys):
    write_files(tmp_path / "all", PHOTOS | {f"more/{n}.jpg": encoded(picture(50 + n)) for n in range(5)})
    write_files(tmp_path / "labeled", PHOTOS)
    words = ["prepare", tmp_path / "labeled", tmp_path / "out", "--unlabeled", tmp_path / "all"]
    assert main([*map(str, words)]) == 0
    fields = read_back(tmp_path / "out")
    assert sum("cls" in files for files in fields.values()) == 8
    assert len(fields) == 13
    assert main([*map(str, [*words[:2], tmp_path / "out2", "--unlabeled", tmp_path / "labeled"])]) == 2


def test_shards_take_images_without_labels(tmp_path):
    write_tar(tmp_path / "shards" / "a.tar", {"1.jpg": PHOTOS["a/0.jpg"], "1.cls": b"0"})
    write_files(tmp_path / "more", PHOTOS)
    words = ["prepare", tmp_path / "shards", tmp_path / "out", "--unlabeled", tmp_path / "more"]
    assert main([*map(str, words)]) == 0
    assert len(read_back(tmp_path / "out")) == 9


def test_the_contact_sheet_has_a_row_for_each_class(tmp_path, capsys):
    write_files(tmp_path / "photos", PHOTOS)
    words = ["prepare", tmp_path / "photos", tmp_path / "out", "--preview"]
    assert main([*map(str, words)]) == 0
    assert str(tmp_path / "out" / "preview.png") in capsys.readouterr().out
    sheet = np.asarray(Image.open(tmp_path / "out" / "preview.png"))
    assert sheet.shape == (2 * (14 + 66), 10 * 66, 3)
    # Four images in each row, and white places.
    for row in (14, 94):
        tiles = sheet[row : row + 66].reshape(66, 10, 66, 3).mean(axis=(0, 2, 3))
        assert (tiles[:4] < 250).all()
        assert (tiles[4:] == 255).all()


@pytest.mark.parametrize("classes", [3, 12])
def test_the_contact_sheet_counts_classes_without_a_row(tmp_path, monkeypatch, classes):
    monkeypatch.setattr("mae_vit.data.prepare.preview._CLASSES", 2)
    write_files(tmp_path / "photos", {f"{n}/0.jpg": PHOTOS["a/0.jpg"] for n in range(classes)})
    assert main(["prepare", str(tmp_path / "photos"), str(tmp_path / "out"), "--preview"]) == 0
    sheet = np.asarray(Image.open(tmp_path / "out" / "preview.png"))
    assert sheet.shape == (3 * (14 + 66), 10 * 66, 3)


def test_the_data_set_is_complete_without_the_contact_sheet(tmp_path, capsys, said):
    write_files(tmp_path / "photos", PHOTOS)
    (tmp_path / "out" / "preview.png").mkdir(parents=True)
    assert main(["prepare", str(tmp_path / "photos"), str(tmp_path / "out"), "--preview"]) == 0
    assert len(read_back(tmp_path / "out")) == len(PHOTOS)
    said(capsys.readouterr().err.splitlines()[-1])
