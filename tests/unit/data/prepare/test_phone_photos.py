"""Photographs as phones and cameras write them, which Pillow does not read."""

import zipfile

import pytest
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("IMG_1.HEIC", "IMG_2.heic", "raw.NEF", "notes.txt", "._IMG_1.HEIC"):
        (folder / name).write_bytes(b"\0\0\0\x18ftypheic")
    return folder


def test_they_are_counted_apart_from_files_that_are_no_photographs(photos, tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(photos / "one.jpg")
    packed = tmp_path / "photos.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in photos.iterdir():
            archive.write(path, path.name)
    for number, source in enumerate((photos, packed)):
        out = tmp_path / str(number)
        assert main(["prepare", str(source), str(out)]) == 0
        output = capsys.readouterr().out
        assert "ignored 2 files (no images)" in output
        assert "left out 3 photographs in a format that cannot be read (2 .heic, 1 .nef): convert" in output
        assert read_dataset(out).splits["train"].samples == 1


def test_a_folder_of_nothing_else_says_what_it_holds(photos, tmp_path, capsys):
    assert main(["prepare", str(photos), str(tmp_path / "out")]) == 2
    assert (
        "left out 3 photographs in a format that cannot be read (2 .heic, 1 .nef)" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
