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

from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import DOWNLOADS, find_images
from mae_vit.data.shards.dataset_json import BUILT_IN
from mae_vit.pretraining.command import main
from mae_vit.runtime.exit_codes import EXIT_FAILED, EXIT_INPUT

# A config that is accepted by mistake would train on.
pytestmark = pytest.mark.timeout(30)


def call(digits, run_dir, *arguments: str) -> int:
    """In this process: the same code path as the command, without its start-up time."""
    return main(
        [
            "--config",
            str(ROOT / "configs/pretrain/mae_digits.yaml"),
            f"data.path={digits}",
            f"run.dir={run_dir}",
            *arguments,
        ]
    )


@pytest.fixture
def damaged(digits, tmp_path) -> Path:
    copy = tmp_path / "data"
    shutil.copytree(digits, copy, ignore=shutil.ignore_patterns(".index"))
    return copy


CONFIG_CASES = {
    "misspelled key": (
        ["objective.mask_ration=0.5"],
        'error: command line: unknown key "objective.mask_ration": did you mean "objective.mask_ratio"?',
    ),
    "forgotten section": (
        ["epochs=3"],
        'error: command line: unknown key "epochs": did you mean "train.epochs"?',
    ),
    "name of a run in a folder": (["run.name=a/b"], "run.name='a/b': letters, digits, . _ - "),
    "empty name of a run": (["run.name="], "gives no value (run.name=null is the default)"),
    "word for true": (["data.augment.flip=yes"], "data.augment.flip='yes': true or false"),
    "wrong type": (["train.epochs=ten"], "train.epochs='ten'"),
    "mask ratio 0": (["objective.mask_ratio=0.0"], "objective.mask_ratio=0.0"),
    "mask ratio 1": (["objective.mask_ratio=1.0"], "objective.mask_ratio=1.0"),
    "mask ratio that masks all": (["objective.mask_ratio=0.99"], "leaves none of 16 patches visible"),
    "mask ratio that masks nothing": (["objective.mask_ratio=1e-17"], "leaves none of 16 patches masked"),
    "patches of one value": (
        ["model.patch_size=1"],
        "norm_pix_loss=true needs patches of more than one value",
    ),
    "too many patches": (["model.img_size=1024", "model.patch_size=2"], "262144 patches: at most 65536"),
    "held-out split that is trained on": (["monitor.evaluate_split=train"], "give another split (test)"),
    "patch size": (["model.patch_size=3"], "patch_size=3 does not divide img_size=8"),
    "batch over micro-batches": (["train.batch_size_per_device=50"], "nearest: 32"),
    "batch larger than the data": (
        ["train.effective_batch_size=5001", "data.repeats=3"],
        "larger than the data",
    ),
    "probe of too many images": (
        ["monitor.probe_shots=101"],
        "monitor.probe_shots=101 of 10 classes are more than the 1000 images that the probe fits on "
        "(at most monitor.probe_shots=100)",
    ),
    "probe of more shots than images": (
        ["monitor.probe_shots=100"],
        'more than half of any class of split "test" (at most monitor.probe_shots=15)',
    ),
    "probe of no images": (
        ["data.split=test", "monitor.probe_every_epochs=1"],
        'monitor.probe_every_epochs=1.0 has no effect: there is no probe (no split "val" or "test")',
    ),
    "shots of no probe": (
        ["monitor.probe_queries=0", "monitor.probe_shots=5"],
        "monitor.probe_shots=5 has no effect: there is no probe (monitor.probe_queries=0)",
    ),
    "missing folder": (["data.path=nowhere"], "data folder nowhere does not exist"),
    "unknown split": (["data.split=trian"], 'no split "trian": did you mean "train"?'),
    "unknown held-out split": (["monitor.evaluate_split=dev"], 'no split "dev"'),
    "resume from nothing": (["--resume", "nowhere"], "--resume nowhere: is no folder"),
    "heads": (["model.num_heads=5"], "model.embed_dim=128 is not divisible by model.num_heads=5"),
    "decoder heads": (["objective.decoder_num_heads=5"], "objective.decoder_embed_dim=96 is not divisible"),
    "pad of another size": (
        ["data.augment.crop=pad", "model.img_size=16"],
        'data.augment.crop="pad" needs images of model.img_size=16, but split "train" holds 8 x 8 px: '
        "use data.augment.crop=random_resized",
    ),
    "pad of another shape": (
        ["data.augment.crop=pad", "model.img_size=[8, 16]"],
        "model.img_size=[8, 16], but",
    ),
    "statistics": (["model.in_chans=3", "data.normalize=[[0.5], [0.5]]"], "data.normalize="),
    "memory limit": (["data.source=memory", "data.memory_limit_gib=1e-9"], "over data.memory_limit_gib"),
    "misspelled option": (["--confg", "x"], 'unrecognized arguments: --confg: did you mean "--config"?'),
    "misspelled --dry-run": (["--dryrun"], 'unrecognized arguments: --dryrun: did you mean "--dry-run"?'),
    "misspelled --resume": (["--resum", "never"], 'did you mean "--resume"?'),
    "misspelled --resume=": (["--resum=never"], 'did you mean "--resume"?'),
    "option of nothing": (
        ["--xyz"],
        "--xyz: known: --config, --dry-run, --extend, --help, --resume; settings are KEY.PATH=VALUE",
    ),
}


@pytest.mark.parametrize("name", CONFIG_CASES)
def test_config(digits, tmp_path, capsys, name):
    arguments, expected = CONFIG_CASES[name]
    assert call(digits, tmp_path / "run", *arguments) == EXIT_INPUT
    assert expected in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_batch_that_does_not_divide_over_ranks(digits, tmp_path, capsys, monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert call(digits, tmp_path / "run") == EXIT_INPUT
    assert "effective_batch_size=128 does not divide over 3 ranks (nearest: 129)" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_incomplete_launcher_environment(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert call(digits, tmp_path / "run") == EXIT_INPUT
    assert "launcher's environment is incomplete" in one_line(capsys)


def test_empty_folder(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert call(tmp_path / "empty", tmp_path / "run") == EXIT_INPUT
    assert (
        f"holds no shards (dataset.json is missing): make it with `mae-vit prepare SRC {tmp_path}"
        in one_line(capsys)
    )


@pytest.mark.parametrize(
    ("there", "asked", "hint"),
    [
        ("data/photos/1", "data/photoz", '`mae-vit prepare SRC data/photoz` (did you mean "data/photos"?)'),
        ("data/photos/1", "dta/photoz", '(did you mean "data/photos"?)'),
        ("data/photos/1", "nowhere/photos", "`mae-vit prepare SRC nowhere/photos`"),
        (
            "data/cifar100/1",
            "data/cifar10",
            "does not exist: make it with `mae-vit prepare cifar10 data/cifar10`",
        ),
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
    assert {*BUILT_IN} == {"digits", *DOWNLOADS}


def test_missing_shard(damaged, tmp_path, capsys):
    (damaged / "train-000001.tar").unlink()
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    assert "train-000001.tar is missing" in one_line(capsys)


def test_truncated_shard(damaged, tmp_path, capsys):
    path = damaged / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:-49_600])
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    line = one_line(capsys)
    assert f"data.damage_budget=0.001 allows 1: shard {path} has " in line
    assert f"see `mae-vit check {damaged}`, mend the shards or raise the budget" in line
    assert not (tmp_path / "run").exists()


def test_shards_of_other_splits_must_be_whole(damaged, tmp_path, capsys):
    path = damaged / "test-000000.tar"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5000])
    assert call(damaged, tmp_path / "run", "data.damage_budget=0.9") == EXIT_INPUT
    assert f"shard {path} has {size - 5000} bytes, dataset.json says {size}" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_unusable_shard(damaged, tmp_path, capsys):
    """Of the right size: what it holds shows when it is read."""
    path = damaged / "train-000000.tar"
    path.write_bytes(os.urandom(path.stat().st_size))
    assert call(damaged, tmp_path / "run") == EXIT_FAILED
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert " of 1,497 samples are damaged, data.damage_budget=0.001 allows 1: " in line


def test_a_folder_of_an_earlier_version(damaged, tmp_path, capsys):
    described = json.loads((damaged / "dataset.json").read_text())
    del described["splits"]["train"]["index"]
    (damaged / "dataset.json").write_text(json.dumps(described))
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    assert f"run `mae-vit prepare --reindex {damaged}`" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_images_of_several_sizes_are_a_range(damaged, tmp_path, capsys):
    described = json.loads((damaged / "dataset.json").read_text())
    described["splits"]["train"]["height"] = [8, 12]
    (damaged / "dataset.json").write_text(json.dumps(described))
    assert call(damaged, tmp_path / "run", "data.augment.crop=pad") == EXIT_INPUT
    assert 'split "train" holds 8-12 x 8 px' in one_line(capsys)


def test_damaged_description(damaged, tmp_path, capsys):
    described = json.loads((damaged / "dataset.json").read_text())
    described["splits"]["train"]["shards"][0]["file"] = "../../etc/passwd.tar"
    (damaged / "dataset.json").write_text(json.dumps(described))
    assert call(damaged, tmp_path / "run") == EXIT_INPUT
    assert "dataset.json is damaged: splits.train.shards.0.file" in one_line(capsys)


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
    without = 'error: held-out split "test" has no labels to measure by: '
    assert main([*supervised, "monitor.evaluate_split=test"]) == EXIT_INPUT
    assert one_line(capsys).startswith(f"{without}give monitor.evaluate_split=val, or prepare it")
    assert not (tmp_path / "run").exists()
    described = json.loads((flat_test / "dataset.json").read_text())
    del described["splits"]["val"]
    (flat_test / "dataset.json").write_text(json.dumps(described))
    assert main(supervised) == EXIT_INPUT
    assert one_line(capsys).startswith(f"{without}prepare it from class folders")
    # Others do without.
    assert call(flat_test, tmp_path / "run", "train.effective_batch_size=8", "--dry-run") == 0
    no_labels = 'none: split "test" has no labels of two classes, with two images of each'
    assert f"probe       {no_labels}\n" in capsys.readouterr().out
    assert call(flat_test, tmp_path / "run", "monitor.probe_every_steps=1") == EXIT_INPUT
    assert "monitor.probe_every_steps=1 has no effect: there is no probe (split" in one_line(capsys)


def test_the_plan_tells_what_the_probe_does(digits, tmp_path, capsys):
    assert call(digits, tmp_path / "run", "--dry-run", "train.epochs=30") == 0
    probe = "fitted on 149 images (up to 15 of each of 10 classes), scored on 151 others of split"
    assert f'probe       {probe} "test", at the end\n' in capsys.readouterr().out
    small = ("monitor.probe_shots=1", "monitor.probe_queries=1", "monitor.probe_every_steps=7")
    assert call(digits, tmp_path / "run", "--dry-run", *small) == 0
    probe = 'fitted on 10 images (up to 1 of each of 10 classes), scored on 1 other of split "test", every 7 steps'
    assert f"probe       {probe} and at the end\n" in capsys.readouterr().out
    assert call(digits, tmp_path / "run", "--dry-run", "monitor.probe_queries=0") == 0
    assert "probe       none: monitor.probe_queries=0\n" in capsys.readouterr().out


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
    message = f'{path}: a config of another command (it has "{key}"): give it to {command}'
    assert one_line(capsys).endswith(message)
    # What was typed is not taken for the file's.
    assert main(["--config", str(ROOT / "configs/pretrain/mae_digits.yaml"), f"{key}.mode=knn"]) == EXIT_INPUT
    assert f'unknown key "{key}"' in one_line(capsys)


def test_run_folder_that_cannot_be_written(digits, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert call(digits, tmp_path / "file" / "run") == EXIT_INPUT
    assert "is not a folder" in one_line(capsys)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_run_folder_on_a_read_only_file_system(digits, capsys):
    assert call(digits, "/proc/run") == EXIT_INPUT
    assert "cannot be written" in one_line(capsys)


def test_resume_from_a_folder_without_checkpoints(digits, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    assert call(digits, tmp_path / "run", "--resume", str(tmp_path / "other")) == EXIT_INPUT
    assert "holds no checkpoint" in one_line(capsys)
