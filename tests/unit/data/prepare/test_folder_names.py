"""Which folders are splits, which are classes: trees as people have them."""

from pathlib import Path

import pytest

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.entries import ImageSource, SourceOptions
from mae_vit.data.prepare.listing import Listing
from mae_vit.data.prepare.path_entries import entries_from_paths


def source_of(paths: str, **options) -> ImageSource:
    files = Listing(images=[(path, bytes) for path in sorted(paths.split())])
    return entries_from_paths(files, SourceOptions(Path("out"), **options), where="photos", name="photos")


def placed(paths: str, **options) -> dict[str, list[str]]:
    """Class names by split; images without a class are "-"."""
    source = source_of(paths, **options)
    found: dict[str, set[str]] = {}
    for entry in source.entries:
        found.setdefault(entry.split, set()).add(entry.class_name or "-")
    return {split: sorted(names) for split, names in sorted(found.items())}


CLEAR = {
    "any case and spelling": (
        "Training/cat/1.jpg Training/dog/2.jpg Testing/cat/3.jpg Testing/dog/4.jpg",
        {"test": ["cat", "dog"], "train": ["cat", "dog"]},
    ),
    "three flat splits": ("train/1.jpg val/2.jpg test/3.jpg", {"test": ["-"], "train": ["-"], "val": ["-"]}),
    "VALID and dev are val": ("train/a/1.jpg VALID/a/1.jpg", {"train": ["a"], "val": ["a"]}),
    "train is a class among classes": (
        "boat/1.jpg bus/2.jpg train/3.jpg",
        {"train": ["boat", "bus", "train"]},
    ),
    "valid beside invalid": ("invalid/1.jpg valid/2.jpg", {"train": ["invalid", "valid"]}),
    "a third folder is a split": (
        "train/a/1.jpg test/a/2.jpg extra/3.jpg",
        {"extra": ["-"], "test": ["a"], "train": ["a"]},
    ),
    "two tests": (
        "train/a/1.jpg val/a/1.jpg test_A/a/2.jpg test_B/a/3.jpg",
        {"test_A": ["a"], "test_B": ["a"], "train": ["a"], "val": ["a"]},
    ),
    "suffix": ("train_images/1.jpg test_images/2.jpg", {"test": ["-"], "train": ["-"]}),
    "prefix": ("images-train/a/1.jpg images-test/a/2.jpg", {"test": ["a"], "train": ["a"]}),
    "COCO": ("train2017/1.jpg val2017/2.jpg test2015/2.jpg", {"test": ["-"], "train": ["-"], "val": ["-"]}),
    "COCO's val alone": ("val2017/1.jpg", {"val": ["-"]}),
    "Kaggle": (
        "training_set/training_set/cats/1.jpg training_set/training_set/dogs/1.jpg test_set/test_set/cats/2.jpg",
        {"test": ["cats"], "train": ["cats", "dogs"]},
    ),
    "YOLO": ("images/train/1.jpg images/val/2.jpg", {"train": ["-"], "val": ["-"]}),
    "Roboflow": ("train/images/1.jpg valid/images/2.jpg", {"train": ["-"], "val": ["-"]}),
    "wrapped": ("data/train/cat/1.jpg data/test/cat/2.jpg", {"test": ["cat"], "train": ["cat"]}),
    "splits below classes": (
        "cat/train/1.jpg cat/test/2.jpg dog/train/3.jpg",
        {"test": ["cat"], "train": ["cat", "dog"]},
    ),
    "MVTec's classes": (
        "nut/train/good/1.png nut/test/bent/2.png cap/train/good/1.png",
        {"test": ["nut"], "train": ["cap", "nut"]},
    ),
    "tiny-imagenet": (
        "train/n01/images/1.jpg train/n02/images/1.jpg val/images/2.jpg",
        {"train": ["n01", "n02"], "val": ["-"]},
    ),
    "unlabeled": ("train/cat/1.jpg unlabeled/2.jpg", {"train": ["cat"], "unlabeled": ["-"]}),
    "MVTec's good in two splits": (
        "nut/train/good/1.png nut/test/good/2.png cap/train/good/1.png cap/test/good/1.png",
        {"test": ["cap", "nut"], "train": ["cap", "nut"]},
    ),
    "classes whose images have numbers of their own": (
        "00000/00000_00000.ppm 00010/00000_00010.ppm 00020/00000_00000.ppm",
        {"train": ["00000", "00010", "00020"]},
    ),
    "ages": ("10/1.jpg 20/2.jpg 30/3.jpg", {"train": ["10", "20", "30"]}),
    "thumbnails of images and of a film": (
        "a/1.jpg a/1_thumb.jpg a/2.png a/thumb_2.jpg a/3.webp a/3.webp_thumb.jpg b/4@2x.png b/4.png b/5.MOV_thumb.jpg",
        {"train": ["a", "b"]},
    ),
    "letters of a hand": ("A/1.jpg B/2.jpg", {"train": ["A", "B"]}),
    "WordNet": ("n01440764/1.jpg n01443537/2.jpg", {"train": ["n01440764", "n01443537"]}),
    "one folder of images": ("images/1.jpg images/2.jpg", {"train": ["-"]}),
    "stations": ("train_station/1.jpg train_track/2.jpg", {"train": ["train_station", "train_track"]}),
    "other folders in each class": ("cat/a/1.jpg cat/b/2.jpg dog/c/3.jpg", {"train": ["cat", "dog"]}),
}


@pytest.mark.parametrize("name", CLEAR)
def test_folders_are_read_as_their_owner_means_them(name):
    paths, expected = CLEAR[name]
    assert placed(paths) == expected


TWO_LEVELS = "lab1/cat/1.jpg lab1/dog/2.jpg lab2/cat/3.jpg lab2/dog/4.jpg"
ASKED = {
    "splits or classes": (
        "train_station/1.jpg test_tube/2.jpg",
        'are "test_tube" and "train_station" splits or',
    ),
    "a split name with classes": (
        "train/a/1.jpg more/a/2.jpg",
        'is "train" beside "more" a split or a class?',
    ),
    "one of them unlabeled": (
        "labeled/a/1.jpg unlabeled/2.jpg",
        'is "unlabeled" beside "labeled" a split or',
    ),
    "CycleGAN": (
        "trainA/1.jpg trainB/2.jpg testA/3.jpg testB/4.jpg",
        'are "testA", "testB", "trainA", ... splits',
    ),
    "masks among classes": ("cat/1.jpg masks/1.png", 'are "cat" and "masks" classes? If'),
    "which level": (
        TWO_LEVELS,
        '"lab1" and "lab2" hold the same folders, "cat" and "dog": which are the classes?',
    ),
    "numbered parts": (
        "images_001/a/1.png images_002/a/2.png",
        'are "images_001" and "images_002" classes, or parts',
    ),
    "two parts": (
        "HAM_part_1/1.jpg HAM_part_2/2.jpg",
        "classes, or parts of one set? If classes, mae-vit prepare --class-folder first; if parts, --no-labels",
    ),
    "parts of a thousand": (
        "00000/00000.png 00000/00999.png 01000/01001.png 02000/02000.png",
        'are "00000", "01000", "02000" classes, or parts',
    ),
    "a camera": ("100APPLE/1.jpg 101APPLE/2.jpg", 'are "100APPLE" and "101APPLE" classes, or parts'),
    "days": ("2023-05-01/1.jpg 2023-06-01/2.jpg", "classes, or parts of one set?"),
    "letters": (
        "a/abbey/1.jpg b/beach/2.jpg",
        "parts of one set? If classes, mae-vit prepare --class-folder first; if parts, --class-folder last (classes",
    ),
    "masks in each class": (
        "sick/scan/1.png sick/masks/1.png well/scan/2.png",
        'are "sick/masks" images of the classes? If images of the classes, mae-vit',
    ),
    "versions": (TWO_LEVELS, "if both hold versions of the same images, prepare one of them by itself"),
}


@pytest.mark.parametrize("name", ASKED)
def test_two_meanings_are_asked_in_a_line_that_names_the_answer(name):
    paths, said = ASKED[name]
    with pytest.raises(InputError, match="prepare --class-folder first") as caught:
        placed(paths)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("--no-labels") or "masks" in name
    top = sorted({path.split("/")[0] for path in paths.split()})
    assert placed(paths, class_folder="first") == {"train": top}
    assert placed(paths, labels=False) == {"train": ["-"]}


def test_the_folder_of_the_image_may_be_the_class():
    assert placed(TWO_LEVELS, class_folder="last") == {"train": ["cat", "dog"]}


@pytest.mark.parametrize("paths", ["Train/a/1.jpg train/a/2.jpg", "train_1/1.jpg train_2/2.jpg test/3.jpg"])
def test_two_folders_of_one_split_are_refused(paths):
    with pytest.raises(InputError, match='are both of split "train": move them into one'):
        placed(paths)


def test_spellings_of_unicode_are_one_class():
    assert placed("train/Caf\u00e9/1.jpg test/Cafe\u0301/2.jpg") == {"test": ["Café"], "train": ["Café"]}


@pytest.mark.parametrize(
    ("paths", "class_folder", "said"),
    [
        (
            "run/v1/1.jpg walk/v2/2.jpg",
            None,
            ['folders below classes are none: "run/v1" and "walk/v2" (--class-folder'],
        ),
        ("run/images/1.jpg walk/images/2.jpg", None, []),
        (
            "inn/indoor/1.jpg pub/indoor/2.jpg pub/bar/3.jpg",
            "last",
            ['joined folders of one name to a class: "indoor"'],
        ),
    ],
)
def test_levels_that_are_not_read_are_said(paths, class_folder, said):
    source = source_of(paths, class_folder=class_folder)
    assert len(source.notes) == len(said)
    assert all(map(str.startswith, source.notes, said))


MASKS = {
    "MVTec": (
        "train/good/1.png test/good/2.png test/bent/3.png ground_truth/bent/3_mask.png",
        "ground_truth",
        {"test": ["bent", "good"], "train": ["good"]},
    ),
    "MVTec's classes": (
        "nut/train/good/1.png nut/test/bent/2.png nut/ground_truth/bent/2.png cap/train/good/1.png",
        "nut/ground_truth",
        {"test": ["nut"], "train": ["cap", "nut"]},
    ),
    "VOC": (
        "JPEGImages/1.jpg SegmentationClass/1.png SegmentationObject/1.png",
        "SegmentationClass, SegmentationObject",
        {"train": ["-"]},
    ),
    "beside a split": ("train/1.jpg masks/1.png", "masks", {"train": ["-"]}),
    "of a split": (
        "train/1.jpg train_masks/1.png test/2.jpg",
        "train_masks",
        {"test": ["-"], "train": ["-"]},
    ),
    "of a split, glued": (
        "train/1.jpg trainannot/1.png val/2.jpg valannot/2.png",
        "trainannot, valannot",
        {"train": ["-"], "val": ["-"]},
    ),
    "thumbnails": (
        "cat/1.jpg cat/thumbs/1.jpg dog/2.jpg",
        "cat/thumbs",
        {"train": ["cat", "dog"]},
    ),
    "in each split": (
        "train/images/1.jpg train/labels/1.png val/images/2.jpg val/labels/2.png",
        "train/labels, val/labels",
        {"train": ["-"], "val": ["-"]},
    ),
    "in each class": (
        "sick/1.png sick/masks/1.png well/images/2.png well/masks/2.png",
        "sick/masks, well/masks",
        {"train": ["sick", "well"]},
    ),
}


@pytest.mark.parametrize("class_folder", [None, "first"])
def test_thumbnails_beside_their_images_are_left_out_and_said(class_folder):
    source = source_of(CLEAR["thumbnails of images and of a film"][0], class_folder=class_folder)
    assert {entry.path for entry in source.entries} == {
        "a/1.jpg",
        "a/2.png",
        "a/3.webp",
        "b/4.png",
        "b/5.MOV_thumb.jpg",
    }
    assert (
        "left out 4 images (a/1_thumb.jpg, a/3.webp_thumb.jpg, a/thumb_2.jpg, ...): by the name"
        in "".join(source.notes)
    )


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_masks_beside_images_are_left_out_and_said(name, labels):
    paths, folders, expected = MASKS[name]
    source = source_of(paths, labels=labels)
    assert f" of {folders}: by the folder's name, masks, labels or thumbnails of the others" in "".join(
        source.notes
    )
    assert placed(paths, labels=labels) == (expected if labels else {split: ["-"] for split in expected})
    # An answer that says what the folders are is taken.
    source = source_of(paths, labels=False, class_folder="first")
    assert len(source.entries) == len(paths.split())
