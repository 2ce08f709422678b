"""Images that are masks, bands or copies by their names, and names that tables and downloads change."""

from pathlib import Path

import pytest
from helpers.images import encoded, picture, write_files

from mae_vit.data.prepare.entries import ImageSource, SourceOptions
from mae_vit.data.prepare.listing import Listing
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.prepare.sources.folders import entries_from_paths, open_folder


def open_listed(*paths: str, **options) -> ImageSource:
    files = Listing(images=[(path, bytes) for path in sorted(paths)])
    return entries_from_paths(files, SourceOptions(Path("out"), **options), where="photos", name="photos")


# Images, and what is drawn on them.
DRAWN = {
    "BUSI": (["benign (1).png"], ["benign (1)_mask.png", "benign (1)_mask_1.png"]),
    "ISIC": (["ISIC_1.jpg"], ["ISIC_1_segmentation.png", "ISIC_1_superpixels.png"]),
    "ADE20K": (["ADE_1.jpg"], ["ADE_1_seg.png", "ADE_1_parts_1.png"]),
    "CHASE_DB1": (["Image_01L.jpg"], ["Image_01L_1stHO.png", "Image_01L_2ndHO.png"]),
    "DeepGlobe": (["104_sat.jpg"], ["104_mask.png"]),
    "other words": (["1.jpg"], ["1_gt.png", "1.jpg_label.png", "1.annotation.png", "1 overlay.png"]),
    "masks alone": (["1_mask.png", "2_mask.png", "2_mask_1.png"], []),
    "words alone": (["wine.jpg", "beer_label.jpg", "car_parts.jpg", "car.jpg", "masks.jpg"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_masks_that_lie_beside_their_images_are_left_out(name):
    images, masks = DRAWN[name]
    for options in ({}, {"class_folder": "last"}, {"labels": False}):
        source = open_listed(*(f"a/{path}" for path in (*images, *masks)), "b/0.jpg", **options)
        assert {entry.path for entry in source.entries} == {f"a/{path}" for path in images} | {"b/0.jpg"}
        assert ("overlay" in "".join(source.notes)) == bool(masks)


# A table, the images beside it, and the paths of those that are taken.
TABLES = {
    "CIFAR-10 of Kaggle": (
        "trainLabels.csv", "id,label 1,frog 2,cat", "train/1.png train/2.png test/1.png test/2.png",
        "train/1.png train/2.png",
    ),
    "Label Studio": (
        "p.csv", "image,choice /data/local-files/?d=my%2Bcats/1.jpg,x /data/local-files/?d=my%2Bdogs/1.jpg,x",
        "my+cats/1.jpg my+dogs/1.jpg", "my+cats/1.jpg my+dogs/1.jpg",
    ),
    "of no split": ("labels.csv", "image,label 1,frog 2,cat", "train/1.png test/1.png test/2.png", "test/2.png"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_find_the_images_that_they_mean(tmp_path, name):
    table, rows, images, expected = TABLES[name]
    files = dict.fromkeys(images.split(), encoded(picture(1), "png")) | {
        table: rows.replace(" ", "\n").encode()
    }
    source = find_images(str(write_files(tmp_path / "src", files) / table), tmp_path / "out")
    assert [entry.path for entry in source.entries] == expected.split()


# Images that are taken, and those that are left out; of "gray" the bytes differ.
COPIES = {
    "navoneel": ("yes/1 no/2", "brain/yes/1 brain/no/2"),
    "below others": ("s/yes/1 s/no/2 t/yes/1", "s/brain/yes/1 s/brain/no/2"),
    "of other bytes": ("yes/1 no/2 gray/yes/1 gray/no/2", ""),
    "of a part": ("yes/1 no/2 small/yes/1", ""),
    "of more": ("yes/1 no/2 more/yes/1 more/no/2 more/no/3", ""),
    "of images": ("yes/1 yes/2", "yes/copy/1 yes/copy/2"),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("class_folder", ["first", "last"])
def test_a_copy_of_a_whole_folder_in_it_is_left_out(tmp_path, name, class_folder):
    taken, copied = (text.split() for text in COPIES[name])
    files = {f"{path}.jpg": encoded(picture("gray" in path)) for path in taken + copied}
    source = find_images(
        str(write_files(tmp_path / "src", files)), tmp_path / "out", class_folder=class_folder
    )
    assert sorted(entry.path for entry in source.entries) == sorted(f"{path}.jpg" for path in taken)
    assert any("repeats" in note for note in source.notes) == bool(copied)


PARTS = ["a.tar.gz.partaa", "a.tar.gz.partab", "b.zip.001", "c.z01", "d.tar.aa"]


@pytest.mark.parametrize("images", [{}, {"cat/1.jpg": encoded(picture(1))}])
def test_parts_of_archives_in_a_folder_name_the_remedy(tmp_path, images):
    source = open_folder(
        write_files(tmp_path / "src", dict.fromkeys(PARTS, b"PK") | images | {"e.xyz": b"x"})
    )
    notes = source.all_notes(advise=False)
    assert (source.parts, source.unread) == (PARTS, {"xyz": 1})
    assert ["cat ARCHIVE" in note for note in notes] == [False, True]
