"""Tables of images and labels, as people have them: names without folder or extension, columns of any name."""

import pytest
from helpers.images import encoded, picture, write_files

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset

JPEG = encoded(picture(1))


@pytest.fixture
def prepared(tmp_path, capsys):
    """Prepares a table that lies beside images: (exit code, what was said)."""

    def run(rows, *options, images=("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg")):
        files = {**dict.fromkeys(images, JPEG), "labels.csv": "\n".join(rows).encode()}
        table = write_files(tmp_path / "src", files) / "labels.csv"
        code = main(["prepare", str(table), str(tmp_path / "out"), *options, "--workers", "0"])
        return code, "".join(capsys.readouterr())

    return run


def rows(header, *cells):
    return [header, *(f"{n},{cell}" for n, cell in enumerate(cells, 1))]


IMAGES = ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg")
FIVE = tuple(f"{n}.jpg" for n in range(1, 6))
# Rows, the images beside them, options, the exit code, and what is said.
SAID = {
    "a name of two files": (["image,label", "1,x", "2,y"], ("a/1.jpg", "b/1.jpg", "b/2.jpg"), "", 0, "beside it: 1\n"),
    "not wanted labels": (["id,label", "1,0.5", "1,1.57", "2,x"], IMAGES, "--no-labels", 0, "again in 1 row"),
    "no choice of labels": (["path,label,class", "a/1.jpg,x,y"], IMAGES, "--no-labels", 0, "train: 1 image"),
    "captions": (rows("id,label", *(f"a photo of {n}" for n in range(5))), FIVE, "", 0, "are the labels captions?"),
    "addresses": (["image,label", "https://example.org/1.jpg,x"], IMAGES, "", 2, "download them"),
    "no name": (["image,label", "1,x", ",y"], IMAGES, "", 0, "left out 1 row of labels.csv that name no file\n"),
    "a name of NUL": (["image,label", "1,x", "\0,y"], IMAGES, "", 0, "beside it: \\x00\n"),
    "two splits": (["image,label,split", "1,x,train", "1,x,test"], IMAGES, "", 0, "1 image in several splits\n"),
    "another split": (
        ["path,label", "val/1.jpg,x", "val/2.jpg,y"], ("train/1.jpg", "train/2.jpg"), "", 2, "there are train/1.jpg, ",
    ),
    "another class": (["path,label", "cat/1.jpg,x", "cat/7.jpg,x"], ("cat/1.jpg", "dog/7.jpg"), "", 0, ": cat/7.jpg\n"),
    "an archive": (["path,label", "1.jpg,x"], ("images.zip",), "", 2, "1.jpg: unpack images.zip first"),
    "one split's folder": (["path,label", "val/1.jpg,x"], ("val/1.jpg",), "", 0, "(--split val takes"),
    "several ones": (rows("image,cat,dog", "1,0", "1,1"), IMAGES, "", 0, "cat, dog of 0 and 1 are not one label"),
    "no ones": (rows("image,cat,dog", "1,0", "0,0"), IMAGES, "", 0, "2 has no ones"),
    "fractions": (rows("id,label", "0.5", "1.57"), IMAGES, "", 2, 'the label of 1 is "0.5"'),
    "two labels": (["id,label", "1,x", "1,y"], IMAGES, "", 2, 'the label of 1 is "x" and "y"'),
    "no header": (["a/1.jpg,x", "a/2.jpg,y"], IMAGES, "", 2, "its first line names an image"),
    "equal columns": (["id,Label,label", "1,x,y"], IMAGES, "", 2, "two columns have one name (id, Label, label)"),
    "a huge cell": (["id,label", "1," + "x" * 200_000], IMAGES, "", 2, "line 2 cannot be read"),
    **{
        f"joined by {joint!r}": (
            rows("id,label", "Mass", f'"Mass{joint}Edema"', "Edema"), IMAGES, "", 0, "is by its name Mass and Edema",
        )
        for joint in ("|", " ", ", ")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_odd_is_said(tmp_path, prepared, case):
    table, images, options, expected_code, expected = SAID[case]
    code, said = prepared(table, *options.split(), images=images)
    assert code == expected_code
    assert expected in said
    assert (code == 0) == (tmp_path / "out").exists()


@pytest.mark.parametrize("options", ["", "--image-column ImageID"])
def test_images_in_a_folder_beside_that_of_the_table_are_named(tmp_path, prepared, options):
    write_files(tmp_path / "data", {"7f2bc.jpg": JPEG})
    code, said = prepared(["ImageID,Source", "7f2bc,x"], *options.split(), images=())
    assert code == 2
    assert f"; {tmp_path / 'data'} has images of these names: if they are meant, move the table there" in said


@pytest.mark.parametrize("column", ["id_code", "image", "Image Index"])
def test_names_without_folder_and_extension_are_found(tmp_path, prepared, column):
    code, said = prepared(rows(f"{column},label", "x", "y", "x", "y"))
    assert code == 0
    assert read_dataset(tmp_path / "out").splits["train"].class_counts == [2, 2]
    assert (
        "found 4 files of labels.csv by the ends of their paths (folder, case or extension differ): 1 is a/1.jpg\n"
        in said
    )


def test_columns_that_are_not_read_are_named_and_may_be_chosen(tmp_path, prepared):
    table = rows("id,dx,sex", "nv,m", "mel,f", "nv,f")
    assert (
        "columns of labels.csv that are not read: dx, sex (for labels, mae-vit prepare " in prepared(table)[1]
    )
    assert prepared(table, "--label-column", "dx", "--overwrite")[0] == 0
    assert read_dataset(tmp_path / "out").classes == ["mel", "nv"]
    assert 'did you mean "sex"?' in prepared(table, "--label-column", "sexx", "--overwrite")[1]


@pytest.mark.parametrize(
    ("table", "options", "classes"),
    [
        (
            ["image,path,Label,dx", "a/1.jpg,a/1.jpg,x,x", "a/2.jpg,a/2.jpg,y,y"],
            "--image-column image",
            ["x", "y"],
        ),
        (["path,label,class", "a/1.jpg,x,0", "a/2.jpg,y,1"], "--label-column label", ["x", "y"]),
        (
            ["image,path,label,class", "1,1,x,0", "2,2,y,1"],
            "--image-column image --label-column label",
            ["x", "y"],
        ),
    ],
)
def test_the_line_on_several_columns_names_the_command(tmp_path, prepared, table, options, classes):
    code, said = prepared(table)
    assert code == 2
    assert f"; mae-vit prepare {tmp_path / 'src' / 'labels.csv'} OUT {options} chooses\n" in said
    assert prepared(table, *options.split())[0] == 0
    assert read_dataset(tmp_path / "out").classes == classes


@pytest.mark.parametrize("one", ["1", "1.0", "True"])
def test_columns_with_one_1_in_each_row_are_one_label(tmp_path, prepared, one):
    bits = {"0": {"1": "0", "1.0": "0.0", "True": "False"}[one], "1": one}
    table = rows(
        "filename,age, MEL,NV,UNK", *(",".join(("9", *map(bits.get, row))) for row in ("100", "010", "010"))
    )
    code, said = prepared(table)
    assert code == 0
    assert "took columns with a single 1 in each row for the labels: MEL, NV, UNK\n" in said
    assert "columns of labels.csv that are not read: age\n" in said
    dataset = read_dataset(tmp_path / "out")
    assert (dataset.classes, dataset.splits["train"].class_counts) == (["MEL", "NV"], [1, 2])


def test_numbers_are_classes_in_their_order_and_negative_ones_are_none(tmp_path, prepared):
    code, said = prepared(rows("image,label", "10.0", "2.0", "-1", ""))
    assert code == 0
    assert read_dataset(tmp_path / "out").classes == ["2", "10"]
    assert "2 images without a label: its cell is empty or negative\n" in said


def test_paths_below_another_folder_are_found(tmp_path, prepared):
    assert (
        prepared(["path,label", "b/3.jpg,x", "c/4,y"], images=("data/b/3.jpg", "data/c/4.jpg", "d/4.jpg"))[0]
        == 0
    )
    assert read_dataset(tmp_path / "out").splits["train"].class_counts == [1, 1]


@pytest.mark.parametrize(
    ("path", "image"),
    [
        ("../input/set/images/{}.jpg", "images/{}.jpg"),
        ("/home/ann/upload/{}.jpg", "images/{}.jpg"),
        ("C:\\set\\{}.jpg", "{}.jpg"),
        ("set/train/p{}/a.jpg", "train/p{}/a.jpg"),
        ("img_{}.jpg", "IMG_{}.JPG"),
    ],
)
def test_paths_of_another_machine_are_found_by_their_ends(tmp_path, prepared, path, image):
    table = ["path,label", *(f"{path.format(n)},{'xy'[n % 2]}" for n in range(4))]
    code, said = prepared(table, images=[image.format(n) for n in range(4)])
    assert code == 0
    assert "found 4 files of labels.csv by the ends of their paths" in said
    assert read_dataset(tmp_path / "out").splits["train"].class_counts == [2, 2]


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (["path,label", "train/1.jpg,x", "val/2.jpg,x"], "from the folders of its images: train, val "),
        (
            ["path,is_valid", "train/1.jpg,False", "val/2.jpg,True"],
            "whose is_valid is true for val, the others",
        ),
    ],
)
def test_splits_come_from_is_valid_or_folders(tmp_path, prepared, table, line):
    assert line in prepared(table, images=("train/1.jpg", "val/2.jpg"))[1]
    splits = read_dataset(tmp_path / "out").splits
    assert {name: info.samples for name, info in splits.items()} == {"train": 1, "val": 1}


@pytest.mark.parametrize("column", [("1", "-1", "1", "-1"), ("1.0", "-1.0", "1.0", "-1.0")])
def test_a_column_of_1_and_minus_1_is_two_classes(tmp_path, prepared, column):
    assert "took the labels 1 and -1 of labels.csv for two classes" in prepared(rows("id,label", *column))[1]
    assert read_dataset(tmp_path / "out").classes == ["-1", "1"]


def test_a_text_of_columns_by_tabs_is_a_table(tmp_path, capsys):
    text = "Datei\tKlasse\r\n1.jpg\tKäfer\r\n".encode("utf-16")
    source = write_files(tmp_path / "src", {"1.jpg": JPEG, "Liste.txt": text}) / "Liste.txt"
    assert main(["prepare", str(source), str(tmp_path / "out"), "--label-column", "Klasse"]) == 0
    assert read_dataset(tmp_path / "out").classes == ["Käfer"]
