"""`prepare --labels`: labels from a table, as people have them; `--unlabeled` images; the contact sheet."""

import unicodedata

import numpy as np
import pytest
from helpers.images import encoded, picture, write_files, write_tar, write_zip
from PIL import Image

PHOTOS = {
    f"{folder}/{n}.jpg": encoded(picture(10 * k + n)) for k, folder in enumerate("ab") for n in range(4)
}
ROWS = [("a/0.jpg", "cat"), ("a/1.jpg", "dog"), ("b/0.jpg", "cat"), ("b/1.jpg", "dog")]


@pytest.fixture
def labeled(tmp_path, call):
    """Prepares a folder of eight photographs with a label file: labeled(table, "--option", source="photos")."""
    write_files(tmp_path / "photos", PHOTOS)

    def prepare(table: str | bytes, *options: str, source="photos"):
        (tmp_path / "labels.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
        words = ["--labels", str(tmp_path / "labels.csv"), *options, "--overwrite"]
        return call(tmp_path / source, options=words)

    return prepare


def labels_of(result) -> dict[str, str]:
    """The class of each labeled image by its key."""
    assert result.code == 0
    fields, classes = result.images().items(), result.dataset.classes
    return {key: classes[int(files["cls"])] for key, files in fields if "cls" in files}


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
        # Of the photographs before they were converted.
        "image,label\n" + "".join(f"{path.replace('jpg', 'HEIC')},{label}\n" for path, label in ROWS),
        # Two columns of the same images.
        "id,name,label\n" + "".join(f"{p.removesuffix('.jpg')},{p},{label}\n" for p, label in ROWS),
        # Paths of another machine.
        "path,label\n" + "".join(f"C:\\Users\\me\\photos\\{p},{label}\n".replace("/", "\\") for p, label in ROWS),
        "file,cat,dog\n" + "".join(f"{p},{int(label == 'cat')},{int(label == 'dog')}\n" for p, label in ROWS),
    ],
)  # fmt: skip
def test_labels_are_found_in_every_usual_form(labeled, table):
    result = labeled(table)
    assert labels_of(result) == EXPECTED
    assert "4 images without a label" in result.text


def test_a_label_file_silences_advice_on_other_labels(labeled, tmp_path):
    """Names that may hold classes, and a table beside the images."""
    photos = {f"{name}_{n}.jpg": encoded(picture(n)) for n in range(3) for name in ("cat", "dog")}
    write_files(tmp_path / "flat", {**photos, "labels.csv": b"path,label"})
    result = labeled("image,label\ncat_1.jpg,1\ndog_1.jpg,2\n", source="flat")
    assert result.code == 0
    assert "cat, dog" not in result.text
    assert "CLASS" not in result.text


def test_unknown_and_missing_images_are_counted_and_named(labeled, said):
    table = "image,label\ngone.jpg,cat\n" + "".join(f"{path},{label}\n" for path, label in ROWS)
    said(labeled(table).text.rpartition("\n/")[0])


def test_a_name_that_two_shards_have_gets_no_label(labeled, tmp_path):
    for name, first in (("a", 0), ("b", 1)):
        images = {f"{n}.jpg": PHOTOS[f"{name}/{n}.jpg"] for n in (first, first + 1)}
        write_tar(tmp_path / "shards" / f"{name}.tar", {**images, f"{first}.json": b"{}"})
    result = labeled("image,label\n0.jpg,cat\n1.jpg,dog\n2.jpg,dog\n", source="shards")
    assert labels_of(result) == {"0": "cat", "2": "dog"}
    assert "several images fit 1 file of labels.csv (1.jpg)" in result.text
    refused = labeled("image,label\n1.jpg,dog\n", source="shards")
    assert (refused.code, "several images fit" in refused.text) == (2, True)


@pytest.mark.parametrize(
    ("column", "values"),
    [("subset", "TRAIN valid TEST"), ("is_val", "0 1 0"), ("held_out", "no yes no"), ("3", "train val val")],
)
def test_a_column_of_splits_is_known_by_its_values_too(labeled, column, values):
    head = "" if column == "3" else f"image,label,{column}\n"
    result = labeled(
        head
        + "".join(
            f"{path},{label},{split}\n" for (path, label), split in zip(ROWS[:3], values.split(), strict=True)
        )
    )
    assert {"a/1"} <= {*result.images("val")}
    assert "not read" not in result.text


def test_columns_that_are_not_read_are_told(labeled):
    table = "image,label,split,is_valid,age\n"
    table += "".join(f"{path},{label},{n},often,7\n" for n, (path, label) in enumerate(ROWS))
    result = labeled(table)
    assert "columns of labels.csv that are not read: split, is_valid, age" in result.text
    assert labels_of(result) == EXPECTED


def test_a_list_of_originals_finds_names_that_a_conversion_has_appended_to(labeled, tmp_path):
    write_files(tmp_path / "made", {f"{n}.CR2.jpg": PHOTOS[f"a/{n}.jpg"] for n in range(2)})
    assert labels_of(labeled("image,label\n0.CR2,cat\n1.CR2,dog\n", source="made"))["0_CR2"] == "cat"


def test_a_class_that_may_be_a_missing_label_is_doubted(labeled):
    result = labeled("image,label\n" + "".join(f"{p},{c.replace('dog', 'nan')}\n" for p, c in ROWS))
    assert 'the class "nan" may mean that a label is missing' in result.text


def test_two_columns_that_hold_out_are_one_line(labeled):
    result = labeled("image,label,is_valid,is_test\n" + "".join(f"{p},{c},0,1\n" for p, c in ROWS))
    assert result.code == 2
    assert "is_valid and is_test" in result.text


def test_a_column_asked_for_as_labels_is_not_of_splits(labeled):
    table = "image,kind\n" + "".join(
        f"{p},{kind}\n" for (p, _), kind in zip(ROWS, ("train", "test") * 2, strict=True)
    )
    assert {*labels_of(labeled(table, "--label-column", "2")).values()} == {"train", "test"}


def test_names_match_however_umlauts_are_encoded(labeled, tmp_path):
    """Files of macOS in NFD, the table in NFC; and capitals."""
    decomposed = {
        f"{unicodedata.normalize('NFD', name)}.jpg": encoded(picture(1)) for name in ("Bär", "Föhn")
    }
    write_files(tmp_path / "macos", decomposed)
    result = labeled("image,label\nBär.jpg,cat\nföhn,dog\n", source="macos")
    assert sorted(labels_of(result).values()) == ["cat", "dog"]


def test_splits_of_folders_win_over_a_column(labeled, tmp_path):
    write_files(
        tmp_path / "split",
        {path.replace("a/", "train/").replace("b/", "val/"): PHOTOS[path] for path, _ in ROWS},
    )
    result = labeled("image,label,split\ntrain/0.jpg,cat,val\nval/1.jpg,dog,train\n", source="split")
    assert result.counts() == "train: cat 1, - 1 | val: dog 1, - 1"
    assert "read the splits from the folders of split, not from labels.csv" in result.text
    assert "1 image without a label in labels.csv, used only for pretraining" in result.text


@pytest.mark.parametrize(
    "table",
    [
        "image,label\na/0.jpg,cat|dog\na/1.jpg,cat\n",
        "image,label\na/0.jpg,cat\na/0.jpg,dog\n",
        "image,cat,dog\na/0.jpg,1,1\na/1.jpg,0,1\n",
        "image,age\na/0.jpg,34.5\na/1.jpg,20\n",
        "image,label\nx.jpg,cat\ny.jpg,dog\n",
        "image,kind,age\na/0.jpg,cat,3\n",
        "image\na/0.jpg\na/1.jpg\n",
        "",
        "path,label\n",
        "x.jpg,cat",
        'image,label\na/0.jpg,cat\na/1.jpg,"dog\na/2.jpg,cat"\n',
        "id,label\n0,cat\n1,dog\n",
        "image,label\na/0.jpg,Größe\n".encode("cp1252"),
        b"PK\x03\x04" + b"\x80" * 200,
    ],
    ids=[
        *("joined", "again", "several ones", "numbers", "no image", "two columns", "no labels", "empty"),
        *("names alone", "one line without an image", "a quote", "several images", "cp1252", "Excel"),
    ],
)
def test_what_is_no_class_of_an_image_is_one_line(labeled, said, table):
    refused = labeled(table)
    said(refused.text)
    assert (refused.code, refused.out.exists()) == (2, False)


def test_a_holdout_is_drawn_from_labeled_images(labeled, tmp_path):
    write_files(
        tmp_path / "more",
        {f"{n}.jpg": encoded(picture(100 + n)) for n in range(20)} | {"same.jpg": PHOTOS["a/0.jpg"]},
    )
    table = "".join(f"{path},{label}\n" for path, label in ROWS)
    result = labeled(table, "--holdout", "1/2", "--unlabeled", str(tmp_path / "more"))
    held_out = result.images("val")
    assert len(labels_of(result)) == len(held_out) == 2
    assert all("cls" in files for files in held_out.values())
    # Two with labels, four that the table does not name, and twenty: a copy of a labeled image is left out.
    assert len(result.images()) == 26
    assert "left out 1 image of" in result.text


def test_a_folder_around_the_labeled_one_adds_the_others(tmp_path, call):
    more = {f"more/{n}.jpg": encoded(picture(50 + n)) for n in range(5)}
    around, source = write_files(tmp_path / "all", PHOTOS | more), write_files(tmp_path / "labeled", PHOTOS)
    assert call(source, options=f"--unlabeled {around}").counts() == "train: a 4, b 4, - 5"
    assert call(source, options=f"--unlabeled {source}", out="out2").code == 2
    limited = call(source, options=f"--unlabeled {around} --limit-per-class 1 --holdout 1/4", out="out3")
    assert limited.counts() == "train: a 1, b 1, - 9 | val: a 1, b 1"


def test_copies_of_images_are_left_out_whatever_the_sources(tmp_path, call):
    more = write_files(tmp_path / "more", PHOTOS | {"new.jpg": encoded(picture(99)), "bad.jpg": b""})
    table = "\n".join(["path,label", *(f"{path},{path[0]}" for path in PHOTOS)])
    source = write_files(tmp_path / "src", PHOTOS | {"labels.csv": table.encode()})
    assert call(source / "labels.csv", options=f"--unlabeled {more}").counts() == "train: a 4, b 4, - 1"
    parts = [
        write_files(
            tmp_path / split,
            {f"{split}/{path[2:]}": data for path, data in PHOTOS.items() if path[0] == name},
        )
        for split, name in (("train", "a"), ("val", "b"))
    ]
    result = call(*parts, options=f"--unlabeled {more}", out="out2")
    assert result.counts() == "train: - 5 | val: - 4"
    archive = write_zip(tmp_path / "photos.zip", PHOTOS)
    assert call(archive, options=f"--unlabeled {more}", out="out3").counts() == "train: a 4, b 4, - 1"


def test_the_output_does_not_lie_in_the_source(tmp_path, call, said):
    source = write_files(tmp_path / "src", PHOTOS)
    said(call(source, out="src/out").text)
    assert {path.name for path in source.iterdir()} == {"a", "b"}
    assert call(source, out="src/.hidden").counts() == "train: a 4, b 4"


def test_the_contact_sheet_has_a_row_for_each_class(call):
    result = call(PHOTOS, options="--preview")
    assert str(result.out / "preview.png") in result.text
    sheet = np.asarray(Image.open(result.out / "preview.png"))
    assert sheet.shape == (2 * (14 + 66), 10 * 66, 3)
    # Four images in each row, and white places.
    for row in (14, 94):
        tiles = sheet[row : row + 66].reshape(66, 10, 66, 3).mean(axis=(0, 2, 3))
        assert (tiles[:4] < 250).all()
        assert (tiles[4:] == 255).all()


@pytest.mark.parametrize("classes", [3, 12])
def test_the_contact_sheet_counts_classes_without_a_row(call, monkeypatch, classes):
    monkeypatch.setattr("mae_vit.data.prepare.preview._CLASSES", 2)
    result = call({f"{n}/0.jpg": PHOTOS["a/0.jpg"] for n in range(classes)}, options="--preview")
    sheet = np.asarray(Image.open(result.out / "preview.png"))
    assert sheet.shape == (3 * (14 + 66), 10 * 66, 3)


def test_the_data_set_is_complete_without_the_contact_sheet(tmp_path, call, said):
    (tmp_path / "out" / "preview.png").mkdir(parents=True)
    result = call(PHOTOS, options="--preview")
    assert (result.code, len(result.images())) == (0, len(PHOTOS))
    said(result.text.splitlines()[-1])
