"""Which folders are splits, which are classes: trees as people have them."""

from functools import partial
from pathlib import Path

import pytest
from helpers.images import encoded, picture

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.entries import ImageSource, SourceOptions
from mae_vit.data.prepare.listing import Listing
from mae_vit.data.prepare.sources.folders import entries_from_paths

IMAGE, MASK = (encoded(picture(1, mode=mode), "png") for mode in ("RGB", "1"))


def open_paths(paths: str | list[str], **options) -> ImageSource:
    """Opens files that are no images, or, in a text with *, images, and masks at the paths with *."""
    images = [
        (path.lstrip("*"), partial(bytes, (MASK if path[0] == "*" else IMAGE) if "*" in paths else b""))
        for path in (paths.split() if isinstance(paths, str) else paths)
    ]
    files = Listing(images=sorted(images, key=lambda image: image[0]))
    return entries_from_paths(files, SourceOptions(Path("out"), **options), where="photos", name="photos")


def placed(paths: str, **options) -> str:
    """Class names by split, "-" for images without a class: "train: cat dog | test: -"."""
    names: dict[str, set[str]] = {}
    for entry in open_paths(paths, **options).entries:
        names.setdefault(entry.split, set()).add(entry.class_name or "-")
    return " | ".join(f"{split}: {' '.join(sorted(names[split]))}" for split in sorted(names))


CLEAR = {
    "any case and spelling": ("Training/cat/1.jpg Training/dog/2.jpg Testing/cat/3.jpg", "test: cat | train: cat dog"),
    "VALID and dev are val": ("train/a/1.jpg VALID/a/1.jpg", "train: a | val: a"),
    "train is a class among classes": ("boat/1.jpg bus/2.jpg train/3.jpg", "train: boat bus train"),
    "a third folder is a split": ("train/a/1.jpg test/a/2.jpg extra/3.jpg", "extra: - | test: a | train: a"),
    "two tests": ("train/a/1.jpg val/a/1.jpg test_A/a/2.jpg test_B/a/3.jpg",
                  "test_A: a | test_B: a | train: a | val: a"),
    "prefix": ("images-train/a/1.jpg images-test/a/2.jpg", "test: a | train: a"),
    "twice": ("cars_train/cars_train/1.jpg cars_test/cars_test/2.jpg", "test: - | train: -"),
    "COCO": ("train2017/1.jpg val2017/2.jpg test2015/2.jpg", "test: - | train: - | val: -"),
    "Kaggle": ("training_set/training_set/cats/1.jpg test_set/test_set/cats/2.jpg", "test: cats | train: cats"),
    "YOLO": ("images/train/1.jpg images/val/2.jpg", "train: - | val: -"),
    "Roboflow": ("train/images/1.jpg valid/images/2.jpg", "train: - | val: -"),
    "splits below classes": ("cat/train/1.jpg cat/test/2.jpg dog/train/3.jpg", "test: cat | train: cat dog"),
    "MVTec's classes": ("nut/train/good/1.png nut/test/good/2.png cap/train/good/1.png",
                        "test: nut | train: cap nut"),
    "unlabeled": ("train/cat/1.jpg unlabeled/2.jpg", "train: cat | unlabeled: -"),
    "numbers of their own": ("00000/00000_00000.ppm 00010/00000_00010.ppm 00020/00000_00000.ppm",
                             "train: 00000 00010 00020"),
    "digits and letters": ("0/1.jpg 9/2.jpg A/3.jpg J/4.jpg", "train: 0 9 A J"),
    "WordNet": ("n01440764/1.jpg n01443537/2.jpg", "train: n01440764 n01443537"),
    "one folder of images": ("images/1.jpg images/2.jpg", "train: -"),
    "real and fake": ("real_images/1.jpg fake_images/2.jpg", "train: fake_images real_images"),
    "stations": ("train_station/1.jpg train_track/2.jpg", "train: train_station train_track"),
    "other folders in each class": ("cat/a/1.jpg cat/b/2.jpg dog/c/3.jpg", "train: cat dog"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAR)
def test_folders_are_read_as_their_owner_means_them(name):
    paths, expected = CLEAR[name]
    assert placed(paths) == expected


TWO_LEVELS = "lab1/cat/1.jpg lab1/dog/2.jpg lab2/cat/3.jpg lab2/dog/4.jpg"
ASKED = {
    "splits or classes": "train_station/1.jpg test_tube/2.jpg",
    "a split name with classes": "train/a/1.jpg more/a/2.jpg",
    "one of them unlabeled": "labeled/a/1.jpg unlabeled/2.jpg",
    "CycleGAN": "trainA/1.jpg trainB/2.jpg testA/3.jpg testB/4.jpg",
    "masks among classes": "cat/1.jpg masks/1.png",
    "masks in each class": "sick/scan/1.png sick/masks/1.png well/scan/2.png",
    "which level": TWO_LEVELS,
    "numbered parts": "images_001/a/1.png images_002/a/2.png",
    "parts of a thousand": "00000/00000.png 01000/01001.png 02000/02000.png",
    "a camera": "100APPLE/1.jpg 101APPLE/2.jpg",
    "days": "2022-01-03/1.jpg 2022-01-04_Rome/2.jpg cat/3.jpg",
    "days as in Germany": "01.05.2023/1.jpg 02.05.2023/2.jpg",
    "names and days": "TCGA_CS_4941_19960909/1.tif TCGA_DU_5849_19950405/2.tif",
    "Omniglot": "images_background/Greek/alpha/1.png images_evaluation/Gurmukhi/a/2.png",
    "images again": "ODIR-5K/Training_Images/1_left.jpg preprocessed_images/1_left.jpg",
    "without a label": "cat/1.png no_label/2.png",
}


@pytest.mark.parametrize("name", ASKED)
def test_two_meanings_are_asked_in_a_line_that_names_the_answers(name, said):
    paths = ASKED[name]
    with pytest.raises(InputError) as caught:
        placed(paths)
    said(caught)
    top = sorted({path.split("/")[0] for path in paths.split()})
    assert placed(paths, class_folder="first") == f"train: {' '.join(top)}"
    assert placed(paths, labels=False) == "train: -"


@pytest.mark.parametrize("paths", ["Train/a/1.jpg train/a/2.jpg", "train_1/1.jpg train_2/2.jpg test/3.jpg"])
def test_two_folders_of_one_split_are_refused(paths, said):
    with pytest.raises(InputError) as caught:
        placed(paths)
    said(caught)


@pytest.mark.parametrize(
    ("paths", "class_folder", "folders"),
    [
        ("run/v1/1.jpg walk/v2/2.jpg", None, ['"run/v1", "walk/v2"']),
        ("run/images/1.jpg walk/images/2.jpg", None, []),
        ("inn/indoor/1.jpg pub/indoor/2.jpg pub/bar/3.jpg", "last", ['"indoor"']),
    ],
)
def test_levels_that_are_not_read_are_noted(paths, class_folder, folders):
    notes = open_paths(paths, class_folder=class_folder).notes
    assert len(notes) == len(folders)
    assert all(folder in note for folder, note in zip(folders, notes, strict=True))


# Paths, folders that are left out, and what is left.
MASKS = {
    "MVTec": ("train/good/1.png test/good/2.png test/bent/3.png ground_truth/bent/3_mask.png", "ground_truth",
              "test: bent good | train: good"),
    "MVTec's classes": (
        "nut/train/good/1.png nut/test/bent/2.png nut/ground_truth/bent/2.png cap/train/good/1.png",
        "nut/ground_truth", "test: nut | train: cap nut",
    ),
    "VOC": ("JPEGImages/1.jpg SegmentationClass/1.png SegmentationObject/1.png",
            "SegmentationClass, SegmentationObject", "train: -"),
    "of a split": ("train/1.jpg train_masks/1.png test/2.jpg", "train_masks", "test: - | train: -"),
    "thumbnails": ("cat/1.jpg cat/thumbs/1.jpg dog/2.jpg", "cat/thumbs", "train: cat dog"),
    "in each split": ("train/images/1.jpg train/labels/1.png val/images/2.jpg val/labels/2.png",
                      "train/labels, val/labels", "train: - | val: -"),
    "in each class": ("sick/1.png sick/masks/1.png well/images/2.png well/masks/2.png", "sick/masks, well/masks",
                      "train: sick well"),
    "LoveDA": ("Train/Urban/images_png/1.png Train/Urban/masks_png/1.png Train/Rural/images_png/2.png",
               "Train/Urban/masks_png", "train: Rural Urban"),
    "COCO's things and stuff": (
        "train2017/1.jpg val2017/2.jpg stuffthingmaps/train2017/1.png annotations/panoptic_val2017/2.png",
        "annotations, stuffthingmaps", "train: - | val: -",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_beside_images_are_left_out(name):
    paths, folders, expected = MASKS[name]
    assert placed(paths) == expected
    for options in ({}, {"labels": False}, {"class_folder": "first"}):
        assert f": {folders}: " in "".join(open_paths(paths, **options).notes)


# Paths, those that begin with * of masks; what is left, 2 for a question, and what without labels.
DRAWN = {
    "ISIC": ("Training_Input/a_1.png *Training_Part1_GroundTruth/a_1_segmentation.png", "train: -", 1),
    "more words": ("1_Original/a_1.png *2_All_Groundtruths/1_Cysts/a_1_MA.png", "train: -", 1),
    "Cityscapes": ("leftImg8bit/train/ulm/u_1_leftImg8bit.png *gtFine/train/ulm/u_1_gtFine_labelIds.png", 2, 1),
    "before and after": ("train/A/1.png train/B/1.png *train/label/1.png", 2, 2),
    "in each class": ("sick/scan/1.png *sick/masks/1.png well/scan/2.png *well/masks/2.png", "train: sick well", 2),
    "photographs of masks": ("with_mask/1_mask.png without_mask/1.png", "train: with_mask without_mask", 2),
    "drawings of all classes": ("*mask/1.png *hat/1.png", 2, 2),
    "of other images": ("cat/1.png *cat_labels/2.png", "train: cat cat_labels", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_masks_are_known_by_their_pixels(name):
    paths, expected, images = DRAWN[name]
    if expected == 2:
        with pytest.raises(InputError, match="--no-labels"):
            placed(paths)
    else:
        assert placed(paths) == expected
    for options in ({"labels": False}, {"class_folder": "first"}):
        assert len(open_paths(paths, **options).entries) == images


# Images, and what is drawn on them, by their names.
BESIDE = {
    "BUSI": (["benign (1).png"], ["benign (1)_mask.png", "benign (1)_mask_1.png"]),
    "ISIC": (["ISIC_1.jpg"], ["ISIC_1_segmentation.png", "ISIC_1_superpixels.png"]),
    "ADE20K": (["ADE_1.jpg"], ["ADE_1_seg.png", "ADE_1_parts_1.png"]),
    "CHASE_DB1": (["Image_01L.jpg"], ["Image_01L_1stHO.png", "Image_01L_2ndHO.png"]),
    "DeepGlobe": (["104_sat.jpg"], ["104_mask.png"]),
    "other words": (["1.jpg", "image_2.jpg"], ["1_gt.png", "1.jpg_label.png", "1 overlay.png", "mask_2.png"]),
    "masks alone": (["1_mask.png", "2_mask.png", "2_mask_1.png"], []),
    "words alone": (["wine.jpg", "beer_label.jpg", "car_parts.jpg", "car.jpg", "masks.jpg"], []),
}


@pytest.mark.parametrize("name", BESIDE)
def test_masks_that_lie_beside_their_images_are_left_out(name):
    images, masks = BESIDE[name]
    for options in ({}, {"class_folder": "last"}, {"labels": False}):
        source = open_paths([*(f"a/{path}" for path in (*images, *masks)), "b/0.jpg"], **options)
        assert {entry.path for entry in source.entries} == {f"a/{path}" for path in images} | {"b/0.jpg"}
        assert ("overlay" in "".join(source.notes)) == bool(masks)


def test_thumbnails_beside_their_images_are_left_out():
    paths = "a/1.jpg a/1_thumb.jpg a/2.png a/thumb_2.jpg a/3.webp a/3.webp_thumb.jpg b/4@2x.png b/4.png"
    paths += " b/5.MOV_thumb.jpg"
    for class_folder in (None, "first"):
        source = open_paths(paths, class_folder=class_folder)
        left = {entry.path for entry in source.entries}
        assert left == {"a/1.jpg", "a/2.png", "a/3.webp", "b/4.png", "b/5.MOV_thumb.jpg"}
        assert len(source.notes) == 1
