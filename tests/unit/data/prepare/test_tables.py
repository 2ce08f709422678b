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


@pytest.mark.parametrize("column", ["id_code", "image", "Image Index"])
def test_names_without_folder_and_extension_are_found(tmp_path, prepared, column):
    code, said = prepared(rows(f"{column},label", "x", "y", "x", "y"))
    assert code == 0
    assert read_dataset(tmp_path / "out").splits["train"].class_counts == [2, 2]
    assert (
        "found 4 files of labels.csv by the ends of their paths (folder, case or extension differ): 1 is a/1.jpg\n"
        in said
    )


def test_a_name_of_two_files_is_none(prepared):
    code, said = prepared(rows("image,label", "x", "y"), images=("a/1.jpg", "b/1.jpg", "b/2.jpg"))
    assert code == 0
    assert "1 file of labels.csv not found beside it: 1\n" in said


def test_columns_that_are_not_read_are_named_and_may_be_chosen(tmp_path, prepared):
    table = rows("id,dx,sex", "nv,m", "mel,f", "nv,f")
    assert (
        "columns of labels.csv that are not read: dx, sex (for labels, mae-vit prepare " in prepared(table)[1]
    )
    assert prepared(table, "--label-column", "dx", "--overwrite")[0] == 0
    assert read_dataset(tmp_path / "out").classes == ["mel", "nv"]
    assert 'did you mean "sex"?' in prepared(table, "--label-column", "sexx", "--overwrite")[1]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (rows("id,label", "0.5", "1.57"), 'the label of 1 is "0.5": one class of each image is read'),
        (["id,label", "1,x", "1,y"], 'the label of 1 is "x" and "y": one class of each image is read'),
        (["a/1.jpg,x", "a/2.jpg,y"], "its first line names an image: put a line of names above it"),
        (
            ["path,label,class", "a/1.jpg,x,y"],
            "several columns may be labels: its first line has path, label, class",
        ),
        (["id,Label,label", "1,x,y"], "two columns have one name (id, Label, label): rename one"),
        (["id,label", "1," + "x" * 200_000], "line 2 cannot be read: field larger than field limit"),
    ],
)
def test_what_is_no_table_of_classes_is_refused(tmp_path, prepared, table, expected):
    code, said = prepared(table)
    assert code == 2
    assert expected in said
    assert not (tmp_path / "out").exists()


def test_labels_that_are_refused_are_not_read_without_labels(prepared):
    code, said = prepared(["id,label", "1,0.5", "1,1.57", "2,x"], "--no-labels")
    assert code == 0
    assert "train: 2 images" in said
    assert "labels.csv names images again in 1 row: each is taken once\n" in said


@pytest.mark.parametrize("joint", ["|", " ", ", "])
def test_labels_of_several_classes_are_named(prepared, joint):
    said = prepared(rows("id,label", "Mass", f'"Mass{joint}Edema"', "Edema"))[1]
    assert (
        f'warning: the class "Mass{joint}Edema" is by its name Mass and Edema, which are classes, too' in said
    )


def test_captions_as_classes_are_named(prepared):
    images = [f"{n}.jpg" for n in range(1, 6)]
    said = prepared(rows("id,label", *(f"a photo of {n}" for n in range(5))), images=images)[1]
    assert "warning: each class has one image: are the labels captions?" in said


def test_addresses_are_to_be_downloaded(prepared):
    code, said = prepared(["image,label", "https://example.org/1.jpg,x"])
    assert code == 2
    assert "not found beside it: https://example.org/1.jpg: download them first" in said


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


def test_labels_that_are_not_wanted_need_no_choice(prepared):
    assert prepared(["path,label,class", "a/1.jpg,x,y"], "--no-labels")[0] == 0


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


@pytest.mark.parametrize(("last", "has"), [("1,1", "2"), ("0,0", "no")])
def test_columns_of_several_labels_are_said(tmp_path, prepared, last, has):
    code, said = prepared(rows("image,cat,dog", "1,0", last))
    assert code == 0
    assert (
        f"columns cat, dog of 0 and 1 are not one label: 2 has {has} ones, and one class of each image is read"
        in said
    )
    assert "OUT --label-column NAME)" in said
    assert read_dataset(tmp_path / "out").classes == []


def test_numbers_are_classes_in_their_order_and_negative_ones_are_none(tmp_path, prepared):
    code, said = prepared(rows("image,label", "10.0", "2.0", "-1", ""))
    assert code == 0
    assert read_dataset(tmp_path / "out").classes == ["2", "10"]
    assert "2 images without a label: its cell is empty or negative\n" in said


def test_rows_that_name_no_file_and_images_in_two_splits_are_said(prepared):
    code, said = prepared(
        ["image,label,split", "1,x,train", "1,x,test", ",y,train", ",,", "2,y,train", "\0,y,train"]
    )
    assert code == 0
    assert "left out 1 row of labels.csv that name no file\n" in said
    assert "warning: labels.csv has 1 image in several splits\n" in said
    assert "1 file of labels.csv not found beside it: \\x00\n" in said


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


def test_a_split_folder_is_no_prefix_of_another_machine(prepared):
    code, said = prepared(["path,label", "val/1.jpg,x", "val/2.jpg,y"], images=("train/1.jpg", "train/2.jpg"))
    assert code == 2
    assert "2 files of labels.csv not found beside it: val/1.jpg, val/2.jpg; there are train/1.jpg, " in said


def test_a_missing_file_is_not_taken_from_another_folder(prepared):
    said = prepared(["path,label", "cat/1.jpg,x", "cat/7.jpg,x"], images=("cat/1.jpg", "dog/7.jpg"))[1]
    assert "1 file of labels.csv not found beside it: cat/7.jpg\n" in said


def test_files_that_may_lie_in_an_archive_are_named(prepared):
    said = prepared(["path,label", "1.jpg,x"], images=("images.zip",))[1]
    assert "not found beside it: 1.jpg: unpack images.zip first, which may hold them" in said


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


def test_images_of_one_split_folder_are_said_to_be_taken_for_another(prepared):
    table, images = ["path,label", "val/1.jpg,x"], ("val/1.jpg",)
    line = (
        "all images of labels.csv lie in the folder of split val, but were taken for train (--split val takes"
    )
    assert line in prepared(table, images=images)[1]
    assert "lie in the folder" not in prepared(table, "--split", "val", "--overwrite", images=images)[1]


@pytest.mark.parametrize("column", [("1", "-1", "1", "-1"), ("1.0", "-1.0", "1.0", "-1.0")])
def test_a_column_of_1_and_minus_1_is_two_classes(tmp_path, prepared, column):
    assert "took the labels 1 and -1 of labels.csv for two classes" in prepared(rows("id,label", *column))[1]
    assert read_dataset(tmp_path / "out").classes == ["-1", "1"]


def test_a_text_of_columns_by_tabs_is_a_table(tmp_path, capsys):
    text = "Datei\tKlasse\r\n1.jpg\tKäfer\r\n".encode("utf-16")
    source = write_files(tmp_path / "src", {"1.jpg": JPEG, "Liste.txt": text}) / "Liste.txt"
    assert main(["prepare", str(source), str(tmp_path / "out"), "--label-column", "Klasse"]) == 0
    assert read_dataset(tmp_path / "out").classes == ["Käfer"]
