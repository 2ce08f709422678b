"""Folders as people have them: parts that are no classes, links, formats that are not read, copies in copies."""

import numpy as np
import pytest
from helpers.images import encoded, picture, read_back, write_files, write_tar, write_zip
from unit.data.band_files import npz

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset

JPEG, TIFF = encoded(picture(1)), encoded(picture(2, mode="L"), "tiff")
TREE = {"cat/1.jpg": JPEG, "dog/2.jpg": JPEG}
MNIST = {
    f"raw/train-{what}-ubyte{end}": b"\0\0\x08\3"
    for what in ("images-idx3", "labels-idx1")
    for end in ("", ".gz")
}
STACKS = npz(train_images=np.zeros((4, 8, 8, 3), np.uint8), train_labels=np.zeros((4, 1), np.uint8))


@pytest.fixture
def prepared(tmp_path, capsys):
    """Prepares a source: (exit code, what was said)."""

    def run(source, *options):
        source = write_files(tmp_path / "src", source) if isinstance(source, dict) else source
        more = [option for option in options if option.endswith(".zip")]
        options = [option for option in options if option not in more]
        code = main(["prepare", str(source), *more, str(tmp_path / "out"), *options, "--workers", "0"])
        return code, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize(
    "folders",
    [
        ("bounding_box_train", "bounding_box_test", "query", "gt_bbox"),
        ("bounding_box_train", "bounding_box_test", "extra"),
        ("train", "query", "gallery"),
        ("train", "evaluation"),
        ("leftImg8bit/train/aachen", "leftImg8bit/val/ulm", "gtFine/train/aachen", "gtFine/val/ulm"),
    ],
)
def test_parts_of_a_benchmark_are_a_question(tmp_path, prepared, folders):
    code, said = prepared({f"{folder}/1.jpg": JPEG for folder in folders})
    assert code == 2
    assert "classes?" in said
    assert "prepare " in said
    assert not (tmp_path / "out").exists()


def test_a_class_may_be_called_like_a_part(tmp_path, prepared):
    assert prepared(dict.fromkeys(("query/1.jpg", "cat/1.jpg"), JPEG), "--class-folder", "first")[0] == 0
    assert read_dataset(tmp_path / "out").classes == ["cat", "query"]


def test_a_link_to_a_folder_that_is_taken_is_named(tmp_path, prepared):
    source = write_files(tmp_path / "photos", {f"train/{path}": data for path, data in TREE.items()})
    (source / "val").symlink_to("train")
    code, said = prepared(source)
    assert code == 0
    assert "skipped links to folders that are taken already: val\n" in said


def test_a_dead_link_to_a_folder_is_named(tmp_path, prepared):
    source = write_files(tmp_path / "photos", TREE)
    (source / "val").symlink_to(tmp_path / "nowhere")
    assert "no regular files: pipes, devices or dead links (val)" in prepared(source)[1]


@pytest.mark.parametrize("pack", [write_files, write_tar, write_zip])
def test_what_is_not_read_is_counted(tmp_path, prepared, pack):
    odd = {
        "cat/1.czi": b"x",
        "cat/2.CZI": b"x",
        "a.nii.gz": b"x",
        "b.xyz": b"x",
        "README": b"x",
        "c.txt": b"x",
        **dict.fromkeys(("cat/3.HEIC", "dog/4.heic", "raw.NEF"), b"\0\0\0\x18ftypheic"),
    }
    code, said = prepared(pack(tmp_path / f"a.{pack.__name__[6:]}", TREE | odd))
    assert code == 0
    assert (
        "not read: 1 without an extension, 2 .czi, 1 .nii.gz, 1 .xyz; of .czi, .nii.gz, write each image as PNG "
        "or .npy, and give the folder\n"
    ) in said
    assert "ignored 1 file (no images)" in said
    assert "left out 3 photographs in a format that cannot be read (2 .heic, 1 .nef)" in said
    assert "archive" not in said


def test_of_formats_that_are_not_read_alone_the_error_names_them(prepared):
    code, said = prepared(
        {"data-00000-of-00001.arrow": b"x", "state.json": b"{}", "dataset_info.json": b"{}"}
    )
    assert code == 2
    assert "not read: 1 .arrow; of .arrow, write each image as" in said
    assert '["train"].to_parquet("train.parquet")' in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("folder", [MNIST, {"pathmnist.npz": STACKS}], ids=["MNIST", "MedMNIST"])
def test_a_folder_of_stacks_gets_the_line_of_its_files(prepared, folder):
    code, said = prepared(folder)
    assert code == 2
    assert "write each image as PNG or .npy, and give the folder" in said
    assert "unpack" not in said


def test_placeholders_of_a_cloud_are_named(prepared):
    code, said = prepared(TREE | {"cat/.2.jpg.icloud": b"bplist00", "cat/3.jpg": b""})
    assert code == 0
    assert "not downloaded: 1 file that iCloud keeps (cat/.2.jpg.icloud): download the folder first" in said
    assert "cat/3.jpg: an empty file: is it a placeholder of a cloud, not downloaded?" in said


def test_pyramids_beside_rasters_are_no_images(tmp_path, prepared):
    code, said = prepared({"1.tif": TIFF, "1.tif.ovr": TIFF, "1.tif.aux.xml": b"<PAMDataset>"})
    assert (code, len(read_back(tmp_path / "out"))) == (0, 1)
    assert "ignored 2 files (no images)" in said


@pytest.mark.parametrize(
    "bands",
    [
        ("S2A_1_B02", "S2A_1_B03", "S2A_1_B8A"),
        ("img_channel000_time0_z0", "img_channel001_time0_z0"),
        ("r01c01-ch1sk1fk1fl1", "r01c01-ch2sk1fk1fl1"),
        ("AA02_s1_w1", "AA02_s1_w2"),
    ],
)
def test_bands_in_files_of_their_own_are_named(prepared, bands):
    code, said = prepared({f"{folder}/{band}.tif": TIFF for folder in "pq" for band in bands})
    assert code == 0
    assert f"warning: {', '.join(f'p/{band}.tif' for band in bands)} are by their names bands of one " in said


def test_wells_are_no_bands(prepared):
    assert "bands of one" not in prepared({f"plate_C{n:02}.tif": TIFF for n in range(4)})[1]


@pytest.mark.parametrize(
    "paths",
    [
        ("Photos from 2019/1.jpg", "Photos from 2020/2.jpg", "Rome/3.jpg", "Trash/4.jpg"),
        ("p/originals/0/1.jpg", "p/originals/A/2.jpg", "p/resources/derivatives/0/1_1.jpg"),
        ("patient00001/study1/a.jpg", "patient00002/study1/a.jpg", "patient00002/study2/a.jpg"),
        ("2/0/2/202cd.jpg", "6/e/1/6e158.jpg"),
        ("imagesc/c/e/1.jpg", "imagesr/r/g/2.jpg"),
        ("14/8801/5373.png", "15/17602/10746.png"),
    ],
)
def test_folders_that_are_no_classes_are_a_question(tmp_path, prepared, paths):
    files = dict.fromkeys(paths, JPEG) | {"labels.csv": b"path,label"}
    code, said = prepared(files)
    assert code == 2
    assert (
        " classes, or parts of one set? If classes, mae-vit prepare --class-folder first; if parts, --no-labels"
        in said
    )
    assert "; labels.csv may hold labels: give it in place of the folder" in said
    assert prepared(files, "--no-labels")[0] == 0


@pytest.mark.parametrize("names", ["0123456789", "0123456789ABCDEFGHIJ", "ABCD"])
def test_digits_and_letters_are_classes(prepared, names):
    assert prepared({f"{name}/{at}.jpg": JPEG for at, name in enumerate(names)})[0] == 0


@pytest.mark.parametrize(
    "folders",
    [
        ("stage_2_train_images", "stage_2_test_images"),
        ("images_training_rev1", "images_test_rev1"),
        ("cars_train/cars_train", "cars_test/cars_test"),
    ],
)
def test_split_words_amid_names_of_brothers_are_splits(tmp_path, prepared, folders):
    assert prepared({f"{folder}/{at}.jpg": JPEG for at, folder in enumerate(folders)})[0] == 0
    dataset = read_dataset(tmp_path / "out")
    assert (set(dataset.splits), dataset.classes) == ({"train", "test"}, [])


def test_names_in_two_formats_are_said(prepared):
    files = {f"{room}/{n}.{kind}": JPEG for room in "ab" for n in "12" for kind in ("jpg", "png")}
    assert (
        "warning: 4 names in several formats (a/1.jpg, a/1.png), and each was taken for "
        in prepared(files)[1]
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [(("cat.0", "cat.1", "dog.0", "dog.1"), True), (("IMG_0", "IMG_1", "DSC_0", "DSC_1"), False)],
)
def test_names_that_hold_classes_are_said(prepared, names, said):
    files = {f"train/{name}.jpg": JPEG for name in names} | {"sample_submission.csv": b"id,label"}
    lines = prepared(files)[1]
    assert ("names of images may hold their classes (cat, dog), which are not read" in lines) == said
    assert "may hold labels" not in lines


def test_the_parts_of_a_download_are_one_folder(tmp_path, prepared):
    parts = [
        write_zip(tmp_path / f"photos-2024Z-00{number}.zip", {f"photos/{path}": data})
        for number, (path, data) in enumerate(TREE.items(), 1)
    ]
    assert prepared(parts[0], str(parts[1]))[0] == 0
    assert read_dataset(tmp_path / "out").classes == ["cat", "dog"]
    other = write_zip(tmp_path / "more.zip", {"photos/cat/9.jpg": JPEG, "photos/dog/9.jpg": JPEG})
    code, said = prepared(parts[0], str(other), "--split", "val")
    assert code == 2
    assert "archives unpacked into it" in said
    code, said = prepared(parts[0], str(parts[0]), "--overwrite")
    assert code == 2
    assert "both hold photos/cat/1.jpg: give one" in said


def test_an_archive_of_cifar_names_its_command(tmp_path, prepared):
    code, said = prepared(write_tar(tmp_path / "cifar-10-python.tar.gz", {"data_batch_1": b"x"}))
    assert code == 2
    assert f"; mae-vit prepare cifar10 OUT --root {tmp_path} reads it" in said


@pytest.mark.parametrize("pack", [write_files, write_tar, write_zip])
def test_a_copy_of_a_folder_in_itself_is_left_out(tmp_path, prepared, pack):
    splits = {f"{split}/{path}": data for split in ("train", "test") for path, data in TREE.items()}
    files = {f"chest/{again}{path}": data for again in ("", "chest/") for path, data in splits.items()}
    code, said = prepared(
        pack(tmp_path / f"chest.{pack.__name__[6:]}", files | {"__MACOSX/chest/._1.jpg": JPEG})
    )
    assert code == 0
    assert set(read_dataset(tmp_path / "out").splits) == {"train", "test"}
    assert "left out 4 images of chest/chest: the folder around it holds images of the same names" in said


@pytest.mark.parametrize("pack", [write_tar, write_zip])
def test_a_picture_beside_the_classes_of_an_archive_is_no_silent_loss_of_labels(tmp_path, prepared, pack):
    files = {f"repo/data/{path}": data for path, data in TREE.items()}
    code, said = prepared(pack(tmp_path / f"a.{pack.__name__[6:]}", files | {"repo/logo.jpg": JPEG}))
    assert code == 2
    assert (
        'are "." and "data" classes? If classes, mae-vit prepare --class-folder first; if not, prepare'
        in said
    )


PAGE = b"<!DOCTYPE html><html>Sign in"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        *(
            (f"x.{kind}", PAGE, "x.{} is a web page: the download failed")
            for kind in ("tar", "zip", "parquet", "jpg")
        ),
        *(
            (name, b"PK", "a part of an archive in several files: join them")
            for name in ("a.zip.001", "a.z01", "a.tar.aa")
        ),
        *(
            (name, b"\x1f\x8b", "one file of arrays or images, which is not read: write each image as PNG")
            for name in ("pathmnist.npz", "train-images-idx3-ubyte.gz", "brain.nii.gz", "data.h5")
        ),
    ],
)
def test_files_that_are_no_source_say_what_they_are(tmp_path, prepared, name, content, expected):
    (tmp_path / name).write_bytes(content)
    code, said = prepared(tmp_path / name)
    assert code == 2
    assert expected.format(name.rpartition(".")[2]) in said
    assert len(said.splitlines()) == 1
