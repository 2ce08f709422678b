"""`prepare --reindex`: folders of earlier versions, and shards that somebody wrote anew."""

import json
import os
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
from helpers.images import write_tar

from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.data.prepare import in_place
from mae_vit.data.shards.dataset_json import read_dataset


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


@pytest.fixture
def copy(digits, tmp_path):
    return shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".index"))


@pytest.fixture
def old(copy):
    """As an earlier version wrote it."""
    described = json.loads((copy / "dataset.json").read_text())
    for split in described["splits"].values():
        (copy / split.pop("index")["file"]).unlink()
    (copy / "dataset.json").write_text(json.dumps(described))
    return copy


def test_a_folder_of_an_earlier_version_gets_what_prepare_writes_today(digits, old, capsys):
    hint = (
        f'has no index of split "train", an earlier version wrote it: run `mae-vit prepare --reindex {old}`'
    )
    with pytest.raises(InputError, match=f"^{old} {hint}$"):
        open_index(old, "train")
    assert main(["check", str(old)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: dataset.json: no index of split test: run `mae-vit prepare --reindex {old}`" in out
    assert out.count("damaged") == 2
    assert prepare("--reindex", old) == 0
    assert "train: 1,497 images in 4 shards" in capsys.readouterr().out
    assert {path.name for path in old.iterdir()} == {path.name for path in digits.glob("*.*")} - {".index"}
    for path in digits.glob("*.*"):
        if path.is_file():
            assert (old / path.name).read_bytes() == path.read_bytes(), path
    assert open_index(old, "train").fingerprint == open_index(digits, "train").fingerprint


def test_shards_as_described_are_not_read_whole(old, monkeypatch):
    monkeypatch.setattr(in_place, "describe_shard", None)
    assert prepare("--reindex", old) == 0


def members_of(path):
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]


def test_shards_written_anew_are_described_anew(digits, copy, capsys):
    """Fewer samples, in another order, in a tar of the same size or not."""
    before, path = open_index(digits, "train"), copy / "train-000001.tar"
    members = members_of(path)
    write_tar(path, [*members[-200:], *members[:200]])
    assert prepare("--reindex", copy) == 0
    assert (
        "train: 1 shard changed; image sizes, formats, mean and std stay as they were"
        in capsys.readouterr().out
    )
    index, dataset = open_index(copy, "train"), read_dataset(copy)
    assert len(index) == 1497 - 200 == dataset.splits["train"].samples
    assert index.fingerprint != before.fingerprint
    taken = [*range(400), *range(700, 800), *range(400, 500), *range(800, 1497)]
    assert [index.read(n) for n in range(len(index))] == [before.read(n) for n in taken]
    assert index.labels.tolist() == before.labels[taken].tolist()
    assert dataset.splits["train"].class_counts == np.bincount(before.labels[taken]).tolist()
    assert dataset.splits["train"].shards[0] == before.split_info.shards[0]
    assert main(["check", str(copy), "--decode"]) == 0


BAD = {
    "cut short": (
        lambda path: os.truncate(path, 5000),
        r"truncated at offset 5120 .*: put a whole one there",
    ),
    "gone": (os.unlink, r"train-000001\.tar cannot be read: no such file or directory"),
    "empty image": (
        lambda path: write_tar(path, {"a.png": b""}),
        r"train-000001\.tar holds an empty image: ",
    ),
    "no images": (lambda path: write_tar(path, {"a.txt": b"x"}), r"train-000001\.tar holds no images: "),
    "class": (
        lambda path: write_tar(path, [("a.png", b"x"), ("a.cls", b"10")]),
        r"holds a sample of class 10, dataset\.json names 10 classes",
    ),
    "a file of others": (
        lambda path: (path.parent / "train-index.npy").write_bytes(b"mine"),
        r"train-index\.npy is there already, and is no index",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_indexed_is_one_line_and_changes_nothing(old, capsys, name):
    spoil, expected = BAD[name]
    spoil(old / "train-000001.tar")
    before = {path: path.read_bytes() for path in old.iterdir()}
    assert prepare("--reindex", old) == 2
    with pytest.raises(InputError, match=expected):
        in_place.reindex(old)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in old.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["{old}", "x"], "--reindex takes one folder, not 2"),
        (["{old}", "--resize", "8"], "--reindex changes no shards: --resize needs an OUT folder"),
        (["{old}", "--overwrite"], "--reindex changes no shards: --overwrite changes nothing"),
        (["{old}", "--workers", "0"], "--workers changes nothing"),
        (["{old}", "--split", "val"], "--split changes nothing"),
        (["{old}", "--in-place"], "not allowed with argument"),
        (["{old}/none"], "does not exist"),
    ],
)
def test_options_without_effect_are_refused(old, capsys, options, expected):
    try:
        code = prepare("--reindex", *[option.format(old=old) for option in options])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert expected in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_linked(old, tmp_path, monkeypatch, capsys):
    """The line that says so holds commands that work."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != old and access(path, mode))
    with pytest.raises(InputError, match=f"^{old} has no index") as raised:
        open_index(old, "train")
    assert prepare("--reindex", old) == 2
    said = str(raised.value)
    assert capsys.readouterr().err.strip().endswith(said.split(" wrote it: ")[1])
    assert (
        f"{old} cannot be written, so let its owner run `mae-vit prepare --reindex {old}`, or link it: `"
        in said
    )
    commands, rest = said.split("or link it: `")[1].split("`")
    assert rest == ", then data.path=data/data"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    *shell, ours = commands.split(" && ")
    subprocess.run(" && ".join(shell), shell=True, check=True)
    assert main(ours.split()[1:]) == 0
    assert len(open_index(tmp_path / "elsewhere" / "data" / "data", "train").read(3)) > 50
    assert "index" not in (old / "dataset.json").read_text()
