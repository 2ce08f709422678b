"""`mae-vit embed`: features, keys and facts of folders, archives and shards."""

import os
import re
import shutil
import tarfile

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, csv_rows, one_line
from helpers.embedding import INFO, call, content, encoded, read_output, write_encoder, write_folder
from helpers.images import write_zip

import mae_vit
from mae_vit.data.index import open_index
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("weights") / "encoder.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder, its files, an archive of each kind of it, and shards."""
    top = tmp_path_factory.mktemp("photos")
    files = write_folder(top / "folder")
    write_zip(top / "photos.zip", dict(reversed(files.items())))
    with tarfile.open(top / "photos.tar.gz", "w:gz") as archive:
        archive.add(top / "folder", ".")
    prepare([find_images(str(top / "folder"), out=top / "shards")], top / "shards", shard_samples=5)
    return top, files


def one_by_one(weights, images: list[bytes], **options) -> np.ndarray:
    encoder = mae_vit.load_encoder(weights, **options)
    with torch.no_grad():
        return torch.cat([encoder(encoder.transform(data)[None]) for data in images]).numpy()


@pytest.mark.parametrize("data", ["folder", "photos.zip", "photos.tar.gz"])
def test_features_are_those_of_the_encoder_in_the_order_of_the_source(weights, photos, tmp_path, data):
    top, files = photos
    out = tmp_path / "new" / "features"
    assert call(weights, top / data, "--out", out, "--batch-size", "5") == 0
    columns = read_output(out)
    np.testing.assert_allclose(columns["features"], one_by_one(weights, list(files.values())), atol=2e-5)
    assert columns["features"].dtype == np.float32
    expected = [name.split("/") for name in files]
    assert columns["keys"].tolist() == [f"{parts[1]}/{parts[2][:4]}" for parts in expected]
    assert columns["splits"].tolist() == [parts[0] for parts in expected]
    assert [columns["meta"]["classes"][label] for label in columns["labels"]] == [
        parts[1] for parts in expected
    ]
    facts = columns["meta"]
    assert (facts["start"], facts["pool"], facts["img_size"]) == (str(weights), "mean", [16, 16])
    assert facts["digest"] == mae_vit.load_encoder(weights).weights.digest
    assert (facts["mean"], facts["std"]) == (list(INFO.mean), list(INFO.std))
    assert os.listdir(out.parent) == ["features"]


def test_features_of_shards_are_in_their_order(weights, photos, tmp_path):
    top, files = photos
    out = tmp_path / "features"
    assert call(weights, top / "shards", "--out", out, "--batch-size", "4") == 0
    columns = read_output(out)
    # As dataset.json lists them.
    indexes = [open_index(top / "shards", split) for split in ("test", "train")]
    images = [index.read(sample) for index in indexes for sample in range(len(index))]
    np.testing.assert_allclose(columns["features"], one_by_one(weights, images), atol=2e-5)
    assert columns["keys"].tolist() == indexes[0].keys() + indexes[1].keys()
    assert columns["splits"].tolist() == ["test"] * 6 + ["train"] * 12
    by_key = {f"{name.split('/')[1]}/{name[-8:-4]}": data for name, data in files.items()}
    assert [by_key[key] for key in columns["keys"]] == images
    assert [columns["meta"]["classes"][label] for label in columns["labels"]] == [
        key.split("/")[0] for key in columns["keys"]
    ]


@pytest.mark.parametrize("data", ["folder", "shards"])
def test_any_number_of_workers_gives_the_same_bytes(weights, photos, tmp_path, data):
    top, _ = photos
    for workers in ("0", "2"):
        out = tmp_path / workers
        assert call(weights, top / data, "--out", out, "--batch-size", "5", "--workers", workers) == 0
    assert content(tmp_path / "0") == content(tmp_path / "2")


def test_each_option_does_what_it_says(weights, photos, tmp_path):
    top, files = photos
    images = list(files.values())

    def embedded(*options: str) -> dict:
        out = tmp_path / "-".join(["f", *options])
        assert call(weights, top / "folder", "--out", out, *options) == 0
        return read_output(out)

    for given, options in ((("--pool", "cls"), {"pool": "cls"}), (("--img-size", "24"), {"img_size": 24})):
        np.testing.assert_allclose(
            embedded(*given)["features"], one_by_one(weights, images, **options), atol=2e-5
        )
    assert embedded("--dtype", "float16")["features"].dtype == np.float16
    plain, rounded = embedded()["features"], embedded("--precision", "bf16")["features"]
    assert 1e-4 < np.abs(plain - rounded).max() < 0.1
    tests = [name for name in files if name.startswith("test")]
    assert len(embedded("--split", "test")["keys"]) == len(tests)
    assert embedded("--split", "test", "--split", "train")["keys"].tolist() == embedded()["keys"].tolist()
    without = embedded("--no-labels")
    assert "labels" not in without
    assert without["meta"]["classes"] == []


def test_images_beside_a_folder_of_images_need_no_labels(weights, tmp_path, capsys, said):
    for name in ("1.png", "sub/1.png", "sub/2.png"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_bytes(encoded(1, "png"))
    assert call(weights, tmp_path / "new", "--out", tmp_path / "f") == 0
    said(capsys.readouterr().out.splitlines()[0])
    columns = read_output(tmp_path / "f")
    assert set(columns) == {"features", "keys", "paths", "meta"}
    assert columns["paths"].tolist() == [f"{key}.png" for key in columns["keys"]]
    assert sorted(columns["keys"]) == ["1", "sub/1", "sub/2"]


def test_files_of_images_are_taken_as_they_are_named(weights, photos, tmp_path):
    top, files = photos
    names = [*files][3:0:-1]
    out = tmp_path / "features"
    assert call(weights, *(top / "folder" / name for name in [*names, names[0]]), "--out", out) == 0
    columns = read_output(out)
    expected = one_by_one(weights, [files[name] for name in names])
    np.testing.assert_allclose(columns["features"], expected, atol=2e-5)
    assert len(set(columns["keys"].tolist())) == 3
    assert [name.endswith(path) for name, path in zip(names, columns["paths"].tolist(), strict=True)] == [
        True
    ] * 3
    assert call(weights, top / "folder" / names[0], "--out", tmp_path / "single") == 0
    np.testing.assert_array_equal(read_output(tmp_path / "single")["features"].shape, (1, expected.shape[1]))


def test_what_is_left_out_is_said(weights, photos, tmp_path, capsys):
    folder = shutil.copytree(photos[0] / "folder", tmp_path / "folder")
    (folder / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "notes.docx").write_bytes(b"notes")
    assert call(weights, folder, "--out", tmp_path / "features") == 0
    printed = capsys.readouterr().out
    assert "1 .docx" in printed
    assert "1 .heic" in printed


def test_broken_files_are_named_and_passed_over(weights, photos, tmp_path, capsys):
    top, files = photos
    folder, out = tmp_path / "folder", tmp_path / "f"
    shutil.copytree(top / "folder", folder)
    names = list(files)
    broken = {names[0]: files[names[0]][:200], names[7]: b"no image", names[-1]: b""}
    for name, data in broken.items():
        (folder / name).write_bytes(data)
    assert call(weights, folder, "--out", out, "--batch-size", "4") == 0
    printed = capsys.readouterr().out
    assert str(out / "broken.csv") in printed
    rows = csv_rows(out / "broken.csv")
    assert [row["path"] for row in rows] == list(broken)
    for row in rows:
        assert row["reason"]
        assert row["split"] == row["path"].split("/")[0]
        assert f"  {row['path']}: {row['reason']}\n" in printed
    whole = [name for name in names if name not in broken]
    columns = read_output(out)
    np.testing.assert_allclose(
        columns["features"], one_by_one(weights, [files[name] for name in whole]), atol=2e-5
    )
    assert columns["keys"].tolist() == [f"{name.split('/')[1]}/{name[-8:-4]}" for name in whole]
    assert len(columns["labels"]) == len(columns["splits"]) == len(whole) == columns["meta"]["rows"]
    assert columns["meta"]["broken"] == 3
    np.save(tmp_path / "saved.npy", columns["features"])
    assert (out / "features.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()
    (tmp_path / "saved.npy").unlink()


def test_damaged_and_missing_shards_are_passed_over(weights, photos, tmp_path, capsys):
    top, _ = photos
    shards, out = tmp_path / "shards", tmp_path / "f"
    shutil.copytree(top / "shards", shards)
    (shards / "test-000001.tar").unlink()
    index = open_index(shards, "train")
    row = index._rows[2]
    with open(shards / index.shard_of(2), "r+b") as file:
        file.seek(int(row["offset"]))
        file.write(b"\0" * int(row["length"]))
    assert call(weights, shards, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "2 broken images" in printed
    assert f"train-000000.tar, key {index.find_key(2)}:" in printed
    columns = read_output(out)
    assert columns["splits"].tolist() == ["test"] * 5 + ["train"] * 11
    assert "" not in columns["keys"]


def test_where_nothing_can_be_read_nothing_is_left(weights, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jpg").write_bytes(b"text")
    assert call(weights, tmp_path / "folder", "--out", tmp_path / "f") == 2
    assert "folder" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    "words",
    [
        *("{top}/folder", "{top}/folder --out {tmp}/f.npz", "{top}/folder --out {top}/folder"),
        *("{top}/none --out {tmp}/f", "{top}/folder {top}/photos.zip --out {tmp}/f"),
        *("{root}/README.md --out {tmp}/f", "https://host/x --out {tmp}/f"),
        *("{top}/folder --out {tmp}/f --split tset", "{top}/folder --out {tmp}/f --img-size 18"),
        *("{top}/folder --out {tmp}/f --batch-size 0", "{top}/folder --out {tmp}/f --workers some"),
        *("{top}/folder --out {tmp}/f --poll cls", "{top}/folder --out {top}/photos.zip/f"),
        pytest.param("{top}/folder --out {tmp}/f --device cuda", marks=NO_GPU),
    ],
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(weights, photos, tmp_path, capsys, words, said):
    assert call(weights, *words.format(top=photos[0], tmp=tmp_path, root=ROOT).split()) == 2
    said(one_line(capsys))
    assert os.listdir(tmp_path) == []


def test_the_current_folder_is_not_replaced_under_its_user(
    weights, photos, tmp_path, monkeypatch, capsys, said
):
    (tmp_path / "f").mkdir()
    monkeypatch.chdir(tmp_path / "f")
    for out in (".", "../f", ".."):
        assert call(weights, photos[0] / "folder", "--out", out) == 2
        said(one_line(capsys))


def test_features_that_are_not_finite_are_refused(photos, tmp_path, capsys):
    path = write_encoder(tmp_path / "large.safetensors", scale=1e6)
    arguments = (path, photos[0] / "folder", "--out", tmp_path / "f")
    assert call(*arguments, "--dtype", "float16") == 2
    assert re.search(r"test/\w+/\d+\.\w+ .*--dtype float32", capsys.readouterr().err)
    assert not (tmp_path / "f").exists()
