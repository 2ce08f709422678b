"""Shards of others, described where they lie, and indexes that are written again."""

import os
import tarfile

import numpy as np
import pytest
from helpers.damage import description
from helpers.images import encoded, img2dataset, labeled_shards, picture, write_files, write_tar
from unit.data.band_files import npy, planes, values

from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.data.prepare import in_place
from mae_vit.data.shards.dataset_json import read_dataset

IMAGE = encoded(picture(), "png")


@pytest.mark.parametrize("shards", [labeled_shards, img2dataset])
def test_in_place_is_measured_like_prepared(tmp_path, call, said, shards):
    folder = shards(tmp_path / "src")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["check", str(folder)]) == 2
    prepared, described = call(folder), call(folder, options="--in-place")
    said(described.text)
    one, two = prepared.dataset, described.dataset
    assert (one.mean, one.std, one.channels, one.classes) == (two.mean, two.std, two.channels, two.classes)
    for name, split in one.splits.items():
        other = two.splits[name]
        assert (split.height, split.width, split.formats) == (other.height, other.width, other.formats)
    assert prepared.counts() == described.counts()
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    indexes = {folder / f"{split}-index.npy" for split in two.splits}
    assert after.keys() - before.keys() == {folder / "dataset.json", *indexes}
    assert {path: after[path] for path in before} == before
    assert main(["check", str(folder), "--decode"]) == 0


def test_bands_in_place(tmp_path, call):
    wide = values(13, "uint16")
    files = {f"{n}.tif": planes(wide + np.uint16(100 * n), compression="lzw") for n in range(3)}
    write_tar(tmp_path / "one" / "train-0.tar", files)
    result = call(tmp_path / "one", options="--in-place --scale 0,9")
    assert {f"{key}.tif": sample["tif"] for key, sample in result.images().items()} == files
    assert (set(result.dataset.bands.low), set(result.dataset.bands.high)) == ({0}, {9})
    scaled = np.stack([wide + 100.0 * n for n in range(3)], axis=1).reshape(13, -1) / 9
    np.testing.assert_allclose(result.dataset.mean, scaled.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(result.dataset.std, scaled.std(axis=1), rtol=1e-6)


def test_bands_described_anew_keep_scale_missing_value_and_names(tmp_path, call):
    wide = values(2, "uint16")
    source = write_files(tmp_path / "a", {f"{n}.tif": planes(wide + np.uint16(n)) for n in range(3)})
    out = call(source, options="--scale 0,9000 --nodata 0").out
    with description(out) as described:
        described["bands"]["names"] = ["red", "infrared"]
    write_tar(out / "train-000000.tar", {"1.npy": npy(wide), "2.npy": npy(wide)})
    again = call(out, options="--in-place --overwrite").dataset
    assert (again.splits["train"].samples, again.bands.names) == (2, ("red", "infrared"))
    assert (again.bands.nodata, set(again.bands.high)) == (0, {9000})
    # An option is followed, although no shard differs.
    assert set(call(out, options="--in-place --overwrite --scale 0,8000").dataset.bands.high) == {8000}


# Members of a.tar (None: no tar, bytes: their first), options behind --in-place.
REFUSED = {
    "a size": ({"1.png": IMAGE}, "--shard-mib 9"),
    "bands": ({"1.png": IMAGE}, "--bands 1"),
    "no shards": (None, ""),
    "no images": ({"1.txt": b"x"}, ""),
    "words": ({"1.png": IMAGE, "1.cls": b"dog"}, ""),
    "a huge class": ({"1.png": IMAGE, "1.cls": b"999999999"}, ""),
    "a broken image": ({"1.jpg": b"no image", "2.png": IMAGE}, ""),
    "described": ({"1.png": IMAGE, "dataset.json": b"{}"}, ""),
    "an index": ({"1.png": IMAGE, "train-index.npy": b"mine"}, ""),
    "damaged": ({"1.png": IMAGE}, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_in_place_is_one_line(tmp_path, call, said, name):
    members, options = REFUSED[name]
    folder = tmp_path / "src"
    folder.mkdir()
    for member in ("dataset.json", "train-index.npy"):
        if members and member in members:
            (folder / member).write_bytes(members[member])
    if members:
        path = write_tar(folder / "a.tar", {name: data for name, data in members.items() if name[0] == "1"})
        path.write_bytes(path.read_bytes()[: 1200 if name == "damaged" else None])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    result = call(folder, options=f"--in-place {options}")
    said(result.text)
    assert result.code == 2
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture
def without_index(copy):
    with description(copy) as described:
        for split in described["splits"].values():
            (copy / split.pop("index")["file"]).unlink()
    return copy


def test_a_folder_without_index_gets_the_one_that_prepare_writes(digits, without_index, monkeypatch):
    command = f"prepare --in-place {without_index} --overwrite"
    with pytest.raises(InputError, match=command):
        open_index(without_index, "train")
    assert main(["check", str(without_index)]) == 1
    with pytest.raises(InputError, match="--split other"):
        in_place.index_in_place(without_index, split="other", overwrite=True)
    # Images of shards as described are not decoded.
    monkeypatch.setattr(in_place, "convert_entries", None)
    assert main(command.split()) == 0
    for path in digits.glob("*.*"):
        if path.is_file():
            assert (without_index / path.name).read_bytes() == path.read_bytes(), path
    assert open_index(without_index, "train").fingerprint == open_index(digits, "train").fingerprint


def test_shards_written_anew_are_described_anew(digits, copy):
    """Fewer samples, in another order. Names of classes and records of preparation stay."""
    before, path = open_index(digits, "train"), copy / "train-000001.tar"
    with description(copy) as described:
        described["classes"][3] = "three"
        described["splits"]["train"]["processing"]["resize"] = 8
    with tarfile.open(path) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    write_tar(path, [*members[-200:], *members[:200]])
    in_place.index_in_place(copy, overwrite=True)
    index, dataset = open_index(copy, "train"), read_dataset(copy)
    split = dataset.splits["train"]
    assert len(index) == 1497 - 200 == split.samples
    assert index.fingerprint != before.fingerprint
    taken = [*range(400), *range(700, 800), *range(400, 500), *range(800, 1497)]
    assert [index.read(n) for n in range(395, 605)] == [before.read(n) for n in taken[395:605]]
    assert index.labels.tolist() == before.labels[taken].tolist()
    assert split.class_counts == np.bincount(before.labels[taken]).tolist()
    assert split.shards[0] == before.split_info.shards[0]
    assert (dataset.classes[3], split.processing.resize) == ("three", 8)
    assert dataset.mean != before.dataset.mean


def test_a_shard_whose_bytes_have_changed_is_named(copy):
    path = copy / "train-000001.tar"
    with tarfile.open(path) as tar:
        place = next(member.offset_data for member in tar if member.name.endswith(".cls"))
    content = path.read_bytes()
    path.write_bytes(content[:place] + (b"1" if content[place:][:1] == b"0" else b"0") + content[place + 1 :])
    notes = in_place.index_in_place(copy, overwrite=True).notes
    assert [note.partition(":")[0] for note in notes if path.name in note] == ["warning"]


SPOIL = {
    "truncated": lambda path: os.truncate(path, 5000),
    "is missing": os.unlink,
    "json is damaged": lambda path: os.truncate(path.parent / "dataset.json", 500),
    "cannot be read": lambda path: write_tar(path, {"a.png": b""}),
    "class 10": lambda path: write_tar(path, [("a.png", b"x"), ("a.cls", b"10")]),
}


@pytest.mark.parametrize("problem", SPOIL)
def test_what_cannot_be_described_anew_is_one_line_and_changes_nothing(without_index, problem, said):
    SPOIL[problem](without_index / "train-000001.tar")
    before = {path: path.read_bytes() for path in without_index.iterdir()}
    with pytest.raises(InputError) as error:
        in_place.index_in_place(without_index, overwrite=True)
    said(error)
    assert {path: path.read_bytes() for path in without_index.iterdir()} == before
