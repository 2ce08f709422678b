"""Bad input to pretrain/run.py: one line, exit code 2, nothing written."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ROOT, one_line
from PIL import Image
from sklearn.datasets import load_digits

from mae_vit.core.errors import EXIT_FAILED, EXIT_INPUT
from mae_vit.data.prepare.prepare import prepare
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


@pytest.fixture
def damaged(digits, tmp_path) -> Path:
    copy = tmp_path / "data"
    shutil.copytree(digits, copy, ignore=shutil.ignore_patterns(".index"))
    return copy


# What a run says of arguments, once it knows its data (mistakes of the config alone: tests/unit/config/test_load.py).
REFUSED = {
    "objective.mask_ration=0.5": "objective.mask_ratio",
    "objective.mask_ratio=0.99": "none of 16 patches visible",
    "objective.mask_ratio=1e-17": "none of 16 patches masked",
    "model.patch_size=1": "norm_pix_loss=true",
    "model.img_size=1024 model.patch_size=2": "262144 patches: at most 65536",
    "monitor.evaluate_split=train": "another split (test)",
    "train.batch_size_per_device=50": "nearest: 32",
    "train.effective_batch_size=5001 data.repeats=3": "train.effective_batch_size=5001",
    "data.split=test monitor.probe_every_epochs=1": "monitor.probe_every_epochs=1.0",
    "monitor.probe_queries=0 monitor.probe_every_steps=5": "(monitor.probe_queries=0)",
    "data.path=nowhere": "data folder nowhere",
    "data.split=trian": '"train"?',
    "monitor.evaluate_split=dev": 'no split "dev"',
    "--resume nowhere": "--resume nowhere: ",
    "model.num_heads=5": "model.num_heads=5",
    "objective.decoder_num_heads=5": "objective.decoder_embed_dim=96",
    "data.augment.crop=pad model.img_size=16": "data.augment.crop=random_resized",
    "model.in_chans=3 data.normalize=[[0.5],[0.5]]": "data.normalize=",
    "data.source=memory data.memory_limit_gib=1e-9": "data.memory_limit_gib",
    "--confg x": '"--config"?',
    "--resum=never": '"--resume"?',
    "--xyz": "known: --config, --dry-run, --extend, --help, --resume; settings are KEY.PATH=VALUE",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_run_that_cannot_be_is_one_line(digits, tmp_path, capsys, words):
    assert call(digits, tmp_path / "run", *words.split()) == EXIT_INPUT
    assert REFUSED[words] in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_batch_that_does_not_divide_over_ranks(digits, tmp_path, capsys, monkeypatch):
    ranks = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert call(digits, tmp_path / "run") == EXIT_INPUT
    assert "nearest: 129" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_incomplete_launcher_environment(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert call(digits, tmp_path / "run") == EXIT_INPUT
    assert "unset RANK" in one_line(capsys)


def test_empty_folder(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert call(tmp_path / "empty", tmp_path / "run") == EXIT_INPUT
    assert f"`mae-vit prepare SRC {tmp_path}" in one_line(capsys)


@pytest.mark.parametrize(
    ("there", "asked", "hint"),
    [
        ("data/photos/1", "data/photoz", '`mae-vit prepare SRC data/photoz` (did you mean "data/photos"?)'),
        ("data/photos/1", "dta/photoz", '(did you mean "data/photos"?)'),
        ("data/photos/1", "nowhere/photos", "`mae-vit prepare SRC nowhere/photos`"),
        ("data/cifar100/1", "data/cifar10", ": make it with `mae-vit prepare cifar10 data/cifar10`"),
        ("data/digits/1", "dta/digits", '`mae-vit prepare digits dta/digits` (did you mean "data/digits"?)'),
    ],
)
def test_a_folder_that_is_not_there(tmp_path, capsys, monkeypatch, there, asked, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / there).parent.mkdir(parents=True)
    (tmp_path / there).touch()
    assert call(asked, tmp_path / "run") == EXIT_INPUT
    assert one_line(capsys).endswith(hint)


def test_a_missing_folder_knows_every_built_in_source():
    assert {*BUILT_IN} == {*DATASETS}


def test_missing_shard(damaged, tmp_path, capsys):
    (damaged / "train-000001.tar").unlink()
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    assert "train-000001.tar is missing" in one_line(capsys)


def test_truncated_shard(damaged, tmp_path, capsys):
    path = damaged / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:-49_600])
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    line = one_line(capsys)
    assert "data.damage_budget=0.001" in line
    assert str(path) in line
    assert f"check {damaged}`" in line
    assert not (tmp_path / "run").exists()


def test_shards_of_other_splits_must_be_whole(damaged, tmp_path, capsys):
    path = damaged / "test-000000.tar"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5000])
    assert call(damaged, tmp_path / "run", "data.damage_budget=0.9") == EXIT_INPUT
    line = one_line(capsys)
    assert all(str(part) in line for part in (path, size - 5000, size))
    assert not (tmp_path / "run").exists()


def test_unusable_shard(damaged, tmp_path, capsys):
    """Of the right size: what it holds shows when it is read."""
    path = damaged / "train-000000.tar"
    path.write_bytes(os.urandom(path.stat().st_size))
    assert call(damaged, tmp_path / "run") == EXIT_FAILED
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert " of 1,497 " in line
    assert "data.damage_budget=0.001" in line


def test_a_folder_of_an_earlier_version(damaged, tmp_path, capsys):
    described = json.loads((damaged / "dataset.json").read_text())
    del described["splits"]["train"]["index"]
    (damaged / "dataset.json").write_text(json.dumps(described))
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    assert f"--in-place {damaged} --overwrite`" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_images_of_several_sizes_are_a_range(damaged, tmp_path, capsys):
    described = json.loads((damaged / "dataset.json").read_text())
    described["splits"]["train"]["height"] = [8, 12]
    (damaged / "dataset.json").write_text(json.dumps(described))
    assert call(damaged, tmp_path / "run", "data.augment.crop=pad") == EXIT_INPUT
    assert "8-12 x 8 px" in one_line(capsys)


def test_damaged_description(damaged, tmp_path, capsys):
    described = json.loads((damaged / "dataset.json").read_text())
    described["splits"]["train"]["shards"][0]["file"] = "../../etc/passwd.tar"
    (damaged / "dataset.json").write_text(json.dumps(described))
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    assert "splits.train.shards.0.file" in one_line(capsys)


@pytest.fixture
def flat_test(tmp_path) -> Path:
    """Digits: train and val in class folders, test in none."""
    data, digits = tmp_path / "flat", load_digits()
    for number in range(60):
        split = ("train", "val", "test")[number % 3]
        place = tmp_path / "images" / split / ("" if split == "test" else str(digits.target[number]))
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(place / f"{number}.png")
    prepare([find_images(str(tmp_path / "images"), out=data)], data)
    return data


SUPERVISED = [
    *(
        "--config",
        str(ROOT / "configs/pretrain/supervised_cifar_tiny.yaml"),
        "model.img_size=8",
        "model.patch_size=2",
    ),
    *("model.in_chans=1", "model.depth=1", "train.effective_batch_size=8", "train.engine=torch"),
    *("train.steps=1", "train.warmup_steps=0", "data.augment.crop=none", "monitor.tensorboard=false"),
]


def test_held_out_images_without_labels_of_a_supervised_run(flat_test, tmp_path, capsys):
    supervised = [*SUPERVISED, f"data.path={flat_test}", f"run.dir={tmp_path / 'run'}"]
    assert main([*supervised, "monitor.evaluate_split=test"]) == EXIT_INPUT
    assert "monitor.evaluate_split=val" in one_line(capsys)
    assert not (tmp_path / "run").exists()
    described = json.loads((flat_test / "dataset.json").read_text())
    del described["splits"]["val"]
    (flat_test / "dataset.json").write_text(json.dumps(described))
    assert main(supervised) == EXIT_INPUT
    assert 'split "test"' in one_line(capsys)
    # Others do without.
    assert call(flat_test, tmp_path / "run", "train.effective_batch_size=8", "--dry-run") == 0
    assert "probe       none: split" in capsys.readouterr().out
    assert call(flat_test, tmp_path / "run", "monitor.probe_every_steps=1") == EXIT_INPUT
    assert "monitor.probe_every_steps=1" in one_line(capsys)


@pytest.mark.timeout(300)
def test_the_plan_tells_what_the_probe_does(digits, tmp_path, capsys):
    small = ("monitor.probe_queries=1", "monitor.probe_every_steps=7")
    for options, named in (
        (("train.epochs=30",), ("149 images", "15 of each of 10", "151 others", "at the end")),
        (small, ("149 images", "1 other", "every 7 steps")),
        (("monitor.probe_queries=0",), ("none: monitor.probe_queries=0",)),
    ):
        assert call(digits, tmp_path / "run", "--dry-run", *options) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("probe  "))
        assert all(part in line for part in named), line


@pytest.mark.parametrize(
    ("config", "key", "command"),
    [
        ("finetune_cifar_tiny", "finetune", "finetune/run.py (mae-vit finetune)"),
        ("compare_demo", "entries", "finetune/compare.py (mae-vit compare)"),
    ],
)
def test_a_config_of_another_command(capsys, config, key, command):
    path = str(ROOT / "configs" / f"{config}.yaml")
    assert main(["--config", path]) == EXIT_INPUT
    assert one_line(capsys).endswith(command)
    # What was typed is not taken for the file's.
    assert main(["--config", CONFIG, f"{key}.mode=knn"]) == EXIT_INPUT
    assert f'"{key}"' in one_line(capsys)


def test_folders_that_do_not_serve(digits, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "other").mkdir()
    for folder, words in (
        (tmp_path / "file" / "run", ()),
        ("/proc/run", ()),
        (tmp_path / "run", ("--resume", str(tmp_path / "other"))),
    ):
        if Path(folder).anchor == "/" and not Path("/proc/self").exists():
            continue
        assert call(digits, folder, *words) == EXIT_INPUT
        assert str(words[-1] if words else folder) in one_line(capsys)
