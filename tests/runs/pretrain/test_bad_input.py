"""Bad input to pretrain/run.py: one line, exit code 2, nothing written."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ROOT, one_line
from helpers.damage import copy_of, description
from PIL import Image
from sklearn.datasets import load_digits

from mae_vit.core.errors import EXIT_FAILED, EXIT_INPUT
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.selection import Selection
from mae_vit.data.prepare.sources.downloads import DATASETS
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.shards.dataset_json import BUILT_IN
from mae_vit.pretraining.command import main

# A config that is accepted by mistake would train on.
pytestmark = pytest.mark.timeout(30)
CONFIG = str(ROOT / "configs/pretrain/mae_digits.yaml")


def call(digits, run_dir, *arguments: str) -> int:
    """In this process: the same code path as the command, without its start-up time."""
    return main(["--config", CONFIG, f"data.path={digits}", f"run.dir={run_dir}", *arguments])


# What a run says of arguments, once it knows its data (mistakes of the config alone: tests/unit/config/test_load.py).
REFUSED = [
    *("objective.mask_ratio=0.99", "model.patch_size=1", "model.img_size=1024 model.patch_size=2"),
    *("data.path=nowhere", "data.split=trian", "--resume nowhere", "model.num_heads=5"),
    *("data.augment.crop=pad model.img_size=16", "model.in_chans=3 data.normalize=[[0.5],[0.5]]"),
    *("data.source=memory data.memory_limit_gib=1e-9", "--confg x", "--xyz", "run.dir=/proc/run"),
    # What was typed is not taken for a key of the file.
    "finetune.mode=knn",
]


@pytest.mark.parametrize("words", REFUSED)
def test_a_run_that_cannot_be_is_one_line(digits, tmp_path, capsys, words, said):
    assert call(digits, tmp_path / "run", *words.split()) == EXIT_INPUT
    said(one_line(capsys))
    assert not (tmp_path / "run").exists()


def test_held_out_images_of_less_than_a_group_are_noted(digits, tmp_path, capsys):
    words = [
        "objective={name: contrastive}",
        "data.repeats=2",
        "data.augment.crop=random_resized",
        "--dry-run",
    ]
    assert call(digits, tmp_path / "run", *words, "monitor.evaluate_images=40") == 0
    assert "40 held-out images are less than a group" in capsys.readouterr().out
    assert call(digits, tmp_path / "run", *words, "monitor.evaluate_images=64") == 0
    assert "less than a group" not in capsys.readouterr().out


def test_folders_that_do_not_serve(digits, tmp_path, capsys, said):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "empty").mkdir()
    assert call(digits, tmp_path / "file" / "run") == EXIT_INPUT
    said(one_line(capsys))
    assert call(digits, tmp_path / "run", "--resume", str(tmp_path / "empty")) == EXIT_INPUT
    said(one_line(capsys))
    assert call(tmp_path / "empty", tmp_path / "run") == EXIT_INPUT
    said(one_line(capsys))


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        *(("photos", "data/photoz"), ("photos", "dta/photoz"), ("photos", "nowhere/photos")),
        *(("cifar100", "data/cifar10"), ("digits", "dta/digits"), ("digits", "hf:user/digits@main")),
    ],
)
def test_a_folder_that_is_not_there(tmp_path, capsys, monkeypatch, there, asked, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / there).mkdir(parents=True)
    (tmp_path / "data" / there / "1").touch()
    assert call(asked, tmp_path / "run") == EXIT_INPUT
    said(one_line(capsys))
    assert {*BUILT_IN} == {*DATASETS}


def describe(data: Path, change) -> None:
    """Changes the training split in dataset.json."""
    with description(data) as described:
        change(described["splits"]["train"])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


# Damage to a data folder, and options.
DAMAGED = {
    "missing shard": (lambda data: (data / "train-000001.tar").unlink(), []),
    "truncated shard": (lambda data: cut(data / "train-000000.tar", 49_600), []),
    # Shards of other splits must be whole.
    "truncated test": (lambda data: cut(data / "test-000000.tar", 5000), ["data.damage_budget=0.9"]),
    "an earlier version": (lambda data: describe(data, lambda train: train.pop("index")), []),
    "several sizes": (
        lambda data: describe(data, lambda train: train.update(height=[8, 12])),
        ["data.augment.crop=pad"],
    ),
    "a path outside": (
        lambda data: describe(data, lambda train: train["shards"][0].update(file="../../etc/passwd.tar")),
        [],
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_data_folder_is_one_line(digits, tmp_path, capsys, case, said):
    change, options = DAMAGED[case]
    data = copy_of(digits, tmp_path / "data")
    change(data)
    assert call(data, tmp_path / "run", *options) == EXIT_INPUT
    said(one_line(capsys))
    assert not (tmp_path / "run").exists()


def test_an_unusable_shard_of_the_right_size_shows_when_it_is_read(digits, tmp_path, capsys):
    data = copy_of(digits, tmp_path / "data")
    path = data / "train-000000.tar"
    path.write_bytes(os.urandom(path.stat().st_size))
    assert call(data, tmp_path / "run") == EXIT_FAILED
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert " of 1,497 " in line
    assert "data.damage_budget=0.001" in line


SUPERVISED = [
    *("--config", str(ROOT / "configs/pretrain/supervised_cifar_tiny.yaml"), "model.img_size=8"),
    *("model.patch_size=2", "model.in_chans=1", "model.depth=1", "train.effective_batch_size=8"),
    *("train.engine=torch", "train.steps=1", "train.warmup_steps=0", "data.augment.crop=none"),
    "monitor.tensorboard=false",
]


def test_held_out_images_without_labels_of_a_supervised_run(tmp_path, capsys):
    """Digits: train in class folders, test in none."""
    data, images = tmp_path / "flat", load_digits()
    for number in range(60):
        split = ("train", "test")[number % 2]
        place = tmp_path / "images" / split / ("" if split == "test" else str(images.target[number]))
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images.images[number] * 15).astype(np.uint8)).save(place / f"{number}.png")
    prepare([find_images(str(tmp_path / "images"), out=data)], data)
    capsys.readouterr()
    supervised = [*SUPERVISED, f"data.path={data}", f"run.dir={tmp_path / 'run'}"]
    assert main(supervised) == EXIT_INPUT
    assert 'split "test"' in one_line(capsys)
    assert not (tmp_path / "run").exists()
    # Training images without labels are counted.
    more = tmp_path / "more"
    (tmp_path / "images" / "test").rename(more)
    added = Selection(extra=[find_images(str(more), out=data)])
    prepare([find_images(str(tmp_path / "images"), out=data)], tmp_path / "some", selection=added)
    capsys.readouterr()
    assert main([*supervised, f"data.path={tmp_path / 'some'}"]) == EXIT_INPUT
    assert '30 of 60 images of split "train" have no label' in one_line(capsys)
    # Others do without.
    assert call(data, tmp_path / "run", "train.effective_batch_size=8", "--dry-run") == 0
    assert "probe       none: split" in capsys.readouterr().out
