"""Tables of images and labels, as people have them: names without folder or extension, columns of any name."""

import pytest
from helpers.images import encoded, picture, write_files

from mae_vit.data.prepare.label_lists import labels_beside

JPEG = encoded(picture(1, (8, 8)))
IMAGES = ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg")
FIVE = tuple(f"{n}.jpg" for n in range(1, 6))


def rows(header, *cells):
    return [header, *(f"{n},{cell}" for n, cell in enumerate(cells, 1))]


def machine(path):
    return ["path,label", *(f"{path.format(n)},{'xy'[n % 2]}" for n in range(4))]


def four(path):
    return tuple(path.format(n) for n in range(4))


XY = "train: x 2, y 2"
MANY = ["image,path,label,class", "1,1,x,0", "2,2,y,1"]
# Rows, the images beside them, options, and the classes of the images, 2 if the table is refused; and its place.
TABLES = {
    "a name of two files": (["image,label", "1,x", "2,y"], ("a/1.jpg", "b/1.jpg", "b/2.jpg"), "", "train: y 1"),
    "names": (rows("id_code,label", "x", "y", "x", "y"), IMAGES, "", XY),
    "labels that are not wanted": (["id,label", "1,0.5", "1,1.57", "2,x"], IMAGES, "--no-labels", "train: - 2"),
    "captions": (rows("id,label", *(f"a photo of {n}" for n in range(5))), FIVE, "",
                 f"train: {', '.join(f'a photo of {n} 1' for n in range(5))}"),
    "joint labels": (rows("id,label", "x", "y", "x|y"), IMAGES, "", "train: x 1, x|y 1, y 1"),
    "addresses": (["image,label", "https://example.org/1.jpg,x"], IMAGES, "", 2),
    "no name": (["image,label", "1,x", ",y"], IMAGES, "", "train: x 1"),
    "a name of NUL": (["image,label", "1,x", "\0,y"], IMAGES, "", "train: x 1"),
    "two splits": (["image,label,split", "1,x,train", "1,x,test"], IMAGES, "", "test: x 1 | train: x 1"),
    "another split": (["path,label", "val/1.jpg,x", "val/2.jpg,y"], ("train/1.jpg", "train/2.jpg"), "", 2),
    "one split's folder": (["path,label", "val/1.jpg,x"], ("val/1.jpg",), "", "train: x 1"),
    "CIFAR-10 of Kaggle": (["id,label", "1,x", "2,y"], ("train/1.jpg", "train/2.jpg", "test/1.jpg", "test/2.jpg"), "",
                           "train: x 1, y 1", "trainLabels.csv"),
    "Label Studio": (["image,label", *(f"/data/local-files/?d=my%2B{n}/1.jpg,x" for n in "ab")],
                     ("my+a/1.jpg", "my+b/1.jpg"), "", "train: x 2"),
    "splits of folders": (["path,label", "train/1.jpg,x", "val/2.jpg,x"], ("train/1.jpg", "val/2.jpg"), "",
                          "train: x 1 | val: x 1"),
    "is_valid": (["path,is_valid", "1.jpg,False", "2.jpg,True"], FIVE, "", "train: - 1 | val: - 1"),
    "several ones": (rows("image,cat,dog", "1,0", "1,1"), IMAGES, "", "train: - 2"),
    "one 1": (rows("image,age,cat,dog", "9,1,0", "9,0,1", "9,0,1"), IMAGES, "", "train: cat 1, dog 2"),
    "fractions": (rows("id,label", "0.5", "1.57"), IMAGES, "", 2),
    "no line of names": (["a/1.jpg,x", "a/2.jpg,y"], IMAGES, "", "train: x 1, y 1"),
    "equal columns": (["id,Label,label", "1,x,y"], IMAGES, "", 2),
    "columns that are not read": (rows("id,dx,sex", "nv,m", "mel,f"), IMAGES, "", "train: - 2"),
    "a column that is asked for": (rows("id,dx,sex", "nv,m", "mel,f"), IMAGES, "--label-column dx",
                                   "train: mel 1, nv 1"),
    "a misspelled column": (rows("id,dx,sex", "nv,m"), IMAGES, "--label-column sexx", 2),
    "several columns": (MANY, IMAGES, "", 2),
    "no column of images": (["a,b", "1,2"], (), "", 2),
    "numbers": (rows("image,label", "10.0", "2.0", "-1", ""), IMAGES, "", "train: 2 1, 10 1, - 2"),
    "signs": (rows("id,label", "1.0", "-1.0", "1", "-1"), IMAGES, "", "train: -1 2, 1 2"),
    "below another folder": (["path,label", "b/3.jpg,x", "c/4,y"], ("data/b/3.jpg", "data/c/4.jpg", "d/4.jpg"), "",
                             "train: x 1, y 1"),
    "Kaggle's paths": (machine("../input/set/images/{}.jpg"), four("images/{}.jpg"), "", XY),
    "paths of another machine": (machine("/home/ann/upload/{}.jpg"), four("images/{}.jpg"), "", XY),
    "a folder each": (machine("set/train/p{}/a.jpg"), four("train/p{}/a.jpg"), "", XY),
    "lists of one": (rows("image,label", "['x']", "['y']"), IMAGES, "", "train: x 1, y 1"),
    "capitals": (machine("img_{}.jpg"), four("IMG_{}.JPG"), "", XY),
    "images of the folder around": (rows("Image name,label", "x", "y"), ("2. Images/1.jpg", "2. Images/2.jpg"), "",
                                    "train: x 1, y 1", "1. Truth/labels.csv"),
    "no image around": (rows("id,label", "x", "y"), (), "--image-column id", 2, "truth/labels.csv"),
    "no names": (["node,x", "4,3000"], IMAGES[:3], "", 2),
    "copies in two folders": (["id,filename,path,label", "0,1.jpg,../b/c/1.jpg,x"], ("a/1.jpg", "c/1.jpg"), "",
                              "train: x 1"),
    "copies in two folders, asked": (["id,filename,path,label", "0,1.jpg,../b/c/1.jpg,x"], ("a/1.jpg", "c/1.jpg"),
                                     "--image-column filename", 2),
    "blanks": (["image_id class_id path", "1 1 a/1.jpg", "2 1 a/2.jpg"], IMAGES, "--label-column class_id",
               "train: 1 2"),
    "commas in a text": (["image,label", "a/1.jpg,x", "a/2.jpg,y"], IMAGES, "", "train: x 1, y 1", "captions.txt"),
    "more cells": (rows("image,label", "x", "y, black"), IMAGES, "", 2),
    "more cells, no line of names": (["1.jpg,x", "2.jpg,y,x"], FIVE, "", 2),
    "a quote that another closes": (["image,label", '1,"x', "2,y", '3,x"', "4,y"], IMAGES, "", 2),
    "a quote that nothing closes": (["image,label", "1,x", '2,"y', "3,x"], IMAGES, "", 2),
    "a text of several lines": (["image,label,report", '1,x,"a', 'b"', "2,y,c"], IMAGES, "", "train: x 1, y 1"),
    "quotes after blanks": (["image, label", '"1.jpg", "x, big"', '"2.jpg", "y"'], FIVE, "",
                            "train: x, big 1, y 1"),
    "a last separator": (["image,label,", "1,x,", "2,y,"], IMAGES, "", "train: x 1, y 1"),
    "Excel's separator": (["sep=;", "image;label", "1;x", "2;y"], IMAGES, "", "train: x 1, y 1"),
    "empty lines": (["", "image,label", "", "1,x", "2,y"], IMAGES, "", "train: x 1, y 1"),
    "blanks in a name": (["image path", "a/1.jpg", "b/my own.jpg"], (*IMAGES, "b/my own.jpg"), "", "train: - 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path, call, said, name):
    lines, images, options, expected, *place = TABLES[name]
    (place,) = place or ["labels.csv"]
    files = {**dict.fromkeys(images, JPEG), place: "\n".join(lines).encode()}
    result = call(write_files(tmp_path / "src", files) / place, options=options)
    said(result.text)
    assert (result.code, result.out.exists()) == ((2, False) if expected == 2 else (0, True))
    assert expected == 2 or result.counts() == expected


READ = {"a/1.jpg": "cat", "a/2.jpg": "dog"}
LISTS = [
    ("1.jpg,cat\n2.jpg,dog", "a/x.csv", READ),
    ("Image Id,Kind of animal\n1,cat\n2,dog", "a/x.csv", READ),
    ("# images and kinds\n1.jpg cat\n2.jpg dog\n", "a/x.txt", READ),
    # No column has one class of each image.
    ("1.jpg,cat\n2.jpg,cat", "a/x.csv", {}),
    ("1.jpg,cat\n2.jpg,dog\n2.jpg,cat", "a/x.csv", {}),
    # Other texts.
    ("1.jpg,cat\n2.jpg,dog", "a/sample_submission.csv", {}),
    ("1.jpg,cat\n2.jpg,dog", "b/x.csv", {}),
    ("a cat on a mat", "a/1.txt", {}),
    ("\xff", "a/x.csv", {}),
]


@pytest.mark.parametrize(("text", "name", "expected"), LISTS)
def test_a_list_of_known_classes_beside_images_is_read(text, name, expected):
    labels, notes = labels_beside(list(READ), {"cat", "dog"}, [(name, lambda: text.encode("latin-1"))])
    assert labels == expected
    assert len(notes) == bool(expected)
    assert all(name in note for note in notes)
