"""Every kind of source: what it becomes, and that a run trains on it."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from helpers.commands import ROOT, SMALL_MAE
from helpers.images import (
    encoded,
    img2dataset,
    labeled_shards,
    picture,
    read_back,
    write_files,
    write_tar,
    write_zip,
)
from torchvision.datasets import CIFAR10, CIFAR100

from mae_vit.cli.main import main
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.pretraining.command import main as pretrain

PHOTOS = {f"{n:03d}.jpg": encoded(picture(n)) for n in range(12)}
CLASSES = {f"c{n % 3}/{n:03d}.jpg": encoded(picture(n)) for n in range(12)}


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def fake_cifar(
    root: Path, kind: type, monkeypatch, classes: list[str], labels_key: str, meta_key: str
) -> None:
    """A tiny copy in torchvision's layout, with its own checksums in torchvision's lists."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True)

    def put(name: str, content: object) -> str:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    rng = np.random.default_rng(0)
    lists = {}
    for split, count in (("train", 8), ("test", 4)):
        batch = {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8)}
        batch[labels_key] = [n % len(classes) for n in range(count)]
        lists[split] = [[f"{split}_batch", put(f"{split}_batch", batch)]]
    monkeypatch.setattr(kind, "train_list", lists["train"])
    monkeypatch.setattr(kind, "test_list", lists["test"])
    meta = {"filename": "names", "key": meta_key, "md5": put("names", {meta_key: classes})}
    monkeypatch.setattr(kind, "meta", meta)


@pytest.fixture
def sources(tmp_path, monkeypatch) -> dict[str, list[object]]:
    """The command line of every kind of source."""
    src = tmp_path / "src"
    fake_cifar(
        src / "cifar", CIFAR100, monkeypatch, ["apple", "bee", "cup"], "fine_labels", "fine_label_names"
    )
    fake_cifar(src / "cifar", CIFAR10, monkeypatch, ["airplane", "cat"], "labels", "label_names")
    return {
        "digits": ["digits"],
        "cifar10": ["cifar10", "--root", src / "cifar"],
        "cifar100": ["cifar100", "--root", src / "cifar"],
        "class folders": [write_files(src / "classes", CLASSES)],
        "tar": [write_tar(src / "a.tar", CLASSES)],
        "tar.gz": [write_tar(src / "a.tar.gz", CLASSES, "w:gz")],
        "zip": [write_zip(src / "a.zip", {f"top/train/{name}": data for name, data in CLASSES.items()})],
        "flat folder": [write_files(src / "flat", PHOTOS)],
        "flat tar": [write_tar(src / "flat.tar", {f"photos/{name}": data for name, data in PHOTOS.items()})],
        "flat zip": [write_zip(src / "flat.zip", PHOTOS)],
        "img2dataset": [img2dataset(src / "laion")],
        "labeled shards": [labeled_shards(src / "shards")],
        "one shard": [labeled_shards(src / "shards") / "imagenet-train-000000.tar"],
    }


LABELED = {
    "digits": 10,
    "cifar10": 2,
    "cifar100": 3,
    "class folders": 3,
    "tar": 3,
    "tar.gz": 3,
    "zip": 3,
    "flat folder": 0,
    "flat tar": 0,
    "flat zip": 0,
    "img2dataset": 0,
    "labeled shards": 11,
    "one shard": 11,
}


def trains(data: Path, run_dir: Path, in_chans: int) -> None:
    options = [
        *SMALL_MAE,
        "train.steps=2",
        "train.warmup_steps=1",
        "train.effective_batch_size=4",
        "train.batch_size_per_device=4",
        "data.augment.crop=random_resized",
        f"model.in_chans={in_chans}",
        "monitor.log_every_steps=1",
        "monitor.evaluate_every_steps=2",
        "monitor.evaluate_images=4",
        "monitor.tensorboard=false",
        f"data.path={data}",
        f"run.dir={run_dir}",
    ]
    assert pretrain(["--config", str(ROOT / "configs" / "pretrain" / "mae_digits.yaml"), *options]) == 0
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize("name", LABELED)
def test_prepared_checked_trained(sources, tmp_path, name):
    out = tmp_path / "out"
    assert prepare(*sources[name], out) == 0
    assert main(["check", str(out), "--decode"]) == 0
    dataset = read_dataset(out)
    labels = open_index(out, "train").labels
    assert len(dataset.classes) == LABELED[name]
    assert len(dataset.splits["train"].class_counts) == LABELED[name]
    assert (labels >= 0).all() if LABELED[name] else (labels == -1).all()
    if name in ("digits", "flat zip", "one shard"):
        trains(out, tmp_path / "run", dataset.channels)


def test_cifar100_has_its_fine_classes_and_pixels(sources, tmp_path):
    assert prepare(*sources["cifar100"], tmp_path / "out") == 0
    dataset = read_dataset(tmp_path / "out")
    assert dataset.classes == ["apple", "bee", "cup"]
    assert {name: split.class_counts for name, split in dataset.splits.items()} == {
        "train": [3, 3, 2],
        "test": [2, 1, 1],
    }


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_changed_pickle_is_not_loaded(sources, tmp_path, monkeypatch, capsys, name):
    class Hostile:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "loaded",))

    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for path in (tmp_path / "src" / "cifar").rglob("train_batch"):
        path.write_bytes(pickle.dumps(Hostile()))
    assert prepare(*sources[name], tmp_path / "out") == 2
    assert f"{name}: no copy under" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "loaded").exists()


def test_images_without_labels_have_no_cls_and_others_read_them(sources, tmp_path, capsys):
    for name in ("flat folder", "flat tar", "flat zip"):
        out = tmp_path / name
        assert prepare(*sources[name], out) == 0
        assert read_back(out) == {name[:-4]: {"jpg": data} for name, data in PHOTOS.items()}
        assert "train: 12 images in 1 shard, no labels" in capsys.readouterr().out
        assert read_dataset(out).classes == []
    shards = [str(path) for path in (tmp_path / "flat zip").glob("train-*.tar")]
    samples = list(wds.WebDataset(shards, shardshuffle=False))
    assert {s["__key__"]: s["jpg"] for s in samples} == {name[:-4]: data for name, data in PHOTOS.items()}
    assert all("cls" not in sample for sample in samples)


def test_one_class_is_no_task(tmp_path, capsys):
    write_files(tmp_path / "photos", {f"all/{name}": data for name, data in PHOTOS.items()})
    assert prepare(tmp_path / "photos", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert ": 1 class, " in said
    assert "note: with one class there is nothing to tell apart; --no-labels" in said
    assert main(["prepare", "--reindex", str(tmp_path / "out")]) == 0
    # There --no-labels is refused.
    assert capsys.readouterr().out.endswith("note: with one class there is nothing to tell apart\n")


def test_labels_can_be_left_out(sources, tmp_path):
    assert prepare(*sources["class folders"], tmp_path / "a", "--no-labels") == 0
    assert read_dataset(tmp_path / "a").classes == []
    assert set(read_back(tmp_path / "a")) == {name[:-4] for name in CLASSES}
    assert prepare(*sources["labeled shards"], tmp_path / "b", "--no-labels") == 0
    assert (open_index(tmp_path / "b", "train").labels == -1).all()


def test_a_split_without_labels_joins_one_with(sources, tmp_path):
    out = tmp_path / "out"
    assert prepare(*sources["class folders"], out) == 0
    assert prepare(*sources["flat folder"], out, "--split", "unlabeled") == 0
    dataset = read_dataset(out)
    assert (len(dataset.classes), dataset.splits["unlabeled"].class_counts) == (3, [0, 0, 0])
    assert main(["check", str(out)]) == 0
    assert (open_index(out, "unlabeled").labels == -1).all()
    # And the other way round: classes come with the first split that has them.
    assert prepare(*sources["flat folder"], tmp_path / "b", "--split", "unlabeled") == 0
    assert prepare(*sources["class folders"], tmp_path / "b") == 0
    both = read_dataset(tmp_path / "b")
    assert (len(both.classes), both.splits["train"].class_counts) == (3, [4, 4, 4])
    assert both.splits["unlabeled"].class_counts == [0, 0, 0]
    assert main(["check", str(tmp_path / "b")]) == 0


def test_an_archive_of_a_zip_gives_the_same_shards_as_its_folder(sources, tmp_path):
    found = []
    for name in ("class folders", "zip", "tar", "tar.gz"):
        assert prepare(*sources[name], tmp_path / name) == 0
        found.append(read_back(tmp_path / name))
        assert not list((tmp_path / name).glob(".*"))
    assert all(one == found[0] for one in found)


def test_shards_of_others_keep_keys_classes_and_splits(sources, tmp_path):
    assert prepare(*sources["labeled shards"], tmp_path / "out") == 0
    dataset = read_dataset(tmp_path / "out")
    assert dataset.classes == [str(n) for n in range(11)]
    assert {name: split.samples for name, split in dataset.splits.items()} == {"train": 12, "val": 2}
    found = read_back(tmp_path / "out")
    assert {key: int(sample["cls"]) for key, sample in found.items()} == {str(n): n % 11 for n in range(12)}
    assert prepare(*sources["img2dataset"], tmp_path / "b") == 0
    found = read_back(tmp_path / "b")
    assert len(found) == 12
    assert found["000010003"] == {"jpg": encoded(picture(13))}


def test_classes_may_be_words(tmp_path):
    folder = labeled_shards(tmp_path / "src", [b"dog\n", b"cat", b"10", b"dog"])
    assert prepare(folder, tmp_path / "out") == 0
    assert read_dataset(tmp_path / "out").classes == ["10", "cat", "dog"]
    assert {k: s["cls"] for k, s in read_back(tmp_path / "out").items()} == {
        "0": b"2", "1": b"1", "2": b"0", "3": b"2"
    }  # fmt: skip


def test_our_own_shards_are_a_source_with_their_classes(sources, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert prepare(*sources["class folders"], first, "--holdout", "1/4") == 0
    assert prepare(first, second, "--resize", "16") == 0
    one, two = read_dataset(first), read_dataset(second)
    assert two.classes == one.classes == ["c0", "c1", "c2"]
    assert {n: s.class_counts for n, s in two.splits.items()} == {
        n: s.class_counts for n, s in one.splits.items()
    }
    assert set(read_back(second)) == set(read_back(first))
    assert two.splits["train"].height == (16, 16)


@pytest.mark.parametrize("name", ["img2dataset", "labeled shards"])
def test_shards_of_others_are_used_in_place(sources, tmp_path, name):
    (folder,) = sources[name]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert prepare("--in-place", folder) == 0
    after = {path: path.read_bytes() for path in folder.iterdir()}
    dataset = read_dataset(folder)
    indexes = {folder / f"{split}-index.npy" for split in dataset.splits}
    assert set(after) - set(before) == {folder / "dataset.json", *indexes}
    assert {path: after[path] for path in before} == before
    assert main(["check", str(folder), "--decode"]) == 0
    assert dataset.splits["train"].samples == 12
    assert len(dataset.classes) == LABELED[name]


def test_a_file_of_others_is_not_taken_for_an_index(sources, capsys):
    (folder,) = sources["labeled shards"]
    (folder / "train-index.npy").write_bytes(b"mine")
    assert prepare("--in-place", folder) == 2
    assert "train-index.npy is there already" in capsys.readouterr().err
    assert (folder / "train-index.npy").read_bytes() == b"mine"


def test_shards_are_not_written_over_their_source(sources, capsys):
    (folder,) = sources["labeled shards"]
    assert prepare(folder, folder, "--overwrite") == 2
    assert f"is the source itself: --in-place {folder}" in capsys.readouterr().err
