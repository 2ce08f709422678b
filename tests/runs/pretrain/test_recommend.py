"""`mae-vit recommend`: the preset for images and machine, the gain to expect, commands that run."""

import re
import shlex
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from helpers.commands import ROOT, csv_rows
from helpers.images import encoded, picture, write_files

from mae_vit.cli.main import main
from mae_vit.comparison.config import CompareConfig
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_preset
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining import recommend
from mae_vit.pretraining.measurements import MEASUREMENTS
from mae_vit.pretraining.recommend import (
    Images,
    choose_preset,
    describe_gain,
    look_at,
    warn_of_few,
)

SCRATCH = {
    "study_length_tiny_imagenet": "from scratch",
    "study_length": "from scratch",
    "study_few_images": "ViT from scratch",
    "study_thousand_photos": "ViT from scratch",
}
ROWS = {
    ("compare_cifar10_5k", 2_925): "ViT-Tiny from MAE, 15 epochs",
    ("compare_cifar10_5k", 19_500): "ViT-Tiny from MAE",
    ("study_few_images", 2_000): "ViT from MAE",
    ("study_thousand_photos", 2_000): "ViT from MAE",
}


@pytest.mark.parametrize("measured", MEASUREMENTS, ids=lambda measured: measured.source)
def test_the_table_has_the_results(measured):
    accuracy, folder = {}, ROOT / "docs" / "results" / measured.source
    assert (folder / "README.md").is_file()
    for row in csv_rows(folder / "results.csv"):
        if row["mode"] == "finetune":
            accuracy.setdefault(row["entry"], []).append(100 * float(row["test_top1"]))
    scratch = mean(accuracy[SCRATCH.get(measured.source, "ViT-Tiny from scratch")])
    for steps, gain in measured.gains.items():
        row = ROWS.get((measured.source, steps), f"MAE, {steps:,} steps")
        assert mean(accuracy[row]) - scratch == pytest.approx(gain, abs=0.06)


@pytest.fixture
def seen(colored):
    """Returns a description of images of any size and number."""
    dataset = read_dataset(colored)

    def describe(side: int, train: int = 5_000, labeled: int = 1_500, channels: int = 3) -> Images:
        info = dataset.splits["train"].model_copy(update={"height": (side, side), "width": (side, side)})
        changed = dataset.model_copy(update={"splits": {"train": info}, "channels": channels})
        return Images("photos", True, colored, changed, train, labeled, 10, 0, 0)

    return describe


@pytest.mark.parametrize(
    ("side", "channels", "cores", "gpu", "preset"),
    [
        (8, 1, 2, False, "mae_digits"),
        (8, 3, 2, False, "mae_cifar_tiny"),
        (64, 3, 2, True, "mae_photos_64"),
        (500, 3, 2, False, "mae_photos_64"),
        (500, 3, 16, False, "mae_photos_96"),
        (96, 3, 2, True, "mae_photos_96"),
        (500, 3, 2, True, "mae_photos_224"),
    ],
)
def test_size_and_machine_choose_the_preset(seen, side, channels, cores, gpu, preset):
    assert choose_preset(seen(side, channels=channels), cores=cores, gpu=gpu).pretrain == preset


def test_bands_have_a_preset_and_no_measurement(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(9):
        np.save(tmp_path / f"{number}.npy", rng.integers(1, 900, (4, 8, 8), np.uint16))
    with look_at(str(tmp_path)) as images:
        assert choose_preset(images, cores=16, gpu=True).pretrain == "mae_satellite"
        assert "9 images of 4 bands of uint16" in images.describe()
        assert describe_gain(images, 6_000).startswith("not known: only photographs")


def test_the_gain_is_of_the_nearest_measurement(seen):
    for images, outside in (
        (25_000, ""),
        (6_350, ""),
        (2_000, ". 2,000 steps of MAE gained 11.9 points"),
        (90_000, "; so many"),
    ):
        assert describe_gain(seen(64, images), 6_000).startswith(f"likely{outside}")
    assert describe_gain(seen(32, 20_000), 3_000).startswith("likely; so few images were not measured")
    assert "likely. 2,000 steps of MAE gained 12.4 points" in describe_gain(seen(64, 5_000), 6_000)
    assert "likely. 6,000 steps of MAE gained 16.7 points" in describe_gain(seen(64, 25_000), 6_000)
    assert "2,000 steps of MAE gained 10.6" in describe_gain(seen(300, 25_000), 3_000)
    assert describe_gain(seen(8, train=1_400, channels=1), 300).startswith("unlikely; ")
    assert describe_gain(seen(64, train=300), 6_000).startswith("not known; so few")
    assert describe_gain(seen(64, 25_000), 1_500).startswith("not known; so few steps")
    assert describe_gain(seen(64, 90_000, labeled=90_000), 6_000).startswith("not known; with so many")


@pytest.mark.parametrize(
    ("labeled", "tested", "classes", "share", "expected"),
    [
        (
            1_350, 150, 50, "1/10",
            "150 held-out images of 50 classes: accuracy is known to ± 8 points "
            "(--holdout 1/3: ± 4)",
        ),
        (1_350, 150, 2, None, "150 held-out images of 2 classes: accuracy is known to ± 8 points"),
        # Uncertain by 4 points, but of few images of each class.
        (
            5_000, 600, 100, "1/10",
            "600 held-out images of 100 classes: accuracy is known to ± 4 points "
            "(--holdout 1/5: ± 3)",
        ),
        (5_000, 500, 50, "1/10", ""),
        (0, 0, 0, None, ""),
    ],
)  # fmt: skip
def test_few_test_images_are_told_with_their_uncertainty(seen, labeled, tested, classes, share, expected):
    images = seen(64)
    splits = dict(images.dataset.splits)
    processing = splits["train"].processing.model_copy(update={"holdout": share})
    splits["val"] = splits["train"].model_copy(update={"processing": processing})
    dataset = images.dataset.model_copy(update={"splits": splits})
    images = replace(
        images, dataset=dataset, labeled=labeled, held_out=tested, tested=tested, classes=classes
    )
    assert warn_of_few(images) == expected


def test_images_that_are_not_prepared_are_held_out_as_few_classes_need(seen):
    for labeled, share in ((20_000, "1/10"), (3_000, "1/5"), (1_500, "1/3"), (0, "1/10")):
        images = replace(seen(64), prepared=False, labeled=labeled, classes=50)
        assert images.share == share
        command, *_ = recommend._commands(images, recommend.PHOTOS_64, [])
        assert f"--holdout {share}" in command


def test_a_micro_batch_is_halved_until_it_fits(colored):
    config = load_config(PretrainConfig, find_preset("mae_photos_64"), [f"data.path={colored}"])
    setup = recommend.set_up(config, recommend.ALONE)
    plan = replace(setup.plan, effective_batch_size=256, batch_size_per_device=256)
    assert recommend.fit_memory(setup, plan, 100.0) == (plan, [])
    costs = replace(setup, plan=replace(plan, batch_size_per_device=64)).costs
    room = costs.memory_gib(world_size=1, zero_stage=0)
    smaller, words = recommend.fit_memory(setup, plan, room)
    assert words == ["train.batch_size_per_device=64"]
    assert (smaller.batch_size_per_device, smaller.accumulation) == (64, 4)


@pytest.mark.parametrize("prepared", [True, False])
def test_what_is_printed_can_be_typed(colored, tmp_path, capsys, monkeypatch, prepared):
    monkeypatch.chdir(tmp_path)
    folder = colored
    if not prepared:
        photos = {f"{name}/{n}.jpg": encoded(picture(n)) for name in ("cats", "dogs") for n in range(20)}
        folder = write_files(tmp_path / "my photos", {**photos, "cats/broken.jpg": b"none"})
    assert main(["recommend", str(folder)]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert len(lines) <= 15
    assert ("1 of 41 that were looked at cannot be read" in " ".join(output.out.split())) != prepared
    assert ("looking at 41 images, in a temporary folder" in output.err) != prepared
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    few = not prepared
    assert names == ["data", "machine", "preset", "time", "gain", *["warning"] * few, "commands"]
    commands = [shlex.split(line) for line in lines[lines.index("commands") + 1 :]]
    # At 32 px there is no comparison for own photographs.
    jobs = ["prepare", "finetune", "pretrain", "finetune"]
    assert [words[1] for words in commands] == (jobs[1:] if prepared else jobs)
    for _, job, *words in commands:
        if job == "pretrain":
            load_config(PretrainConfig, find_preset(words[0]), words[1:])
        if job == "finetune" and words[0] != "--ckpt":
            path = find_preset(words[0])
            load_config(FinetuneConfig, path, words[3:], amend=WeightsOverrides(None, path))
    # It takes the data and their crop from the run.
    assert commands[-1][2:] == ["--ckpt", "runs/mae_cifar_tiny"]
    if not prepared:
        # Nothing was written, and the first command is accepted.
        assert {path.name for path in tmp_path.iterdir()} == {"my photos"}
        assert main(commands[0][1:]) == 0
        assert re.search(r"val: \d+ image", capsys.readouterr().out)


def test_data_behind_a_url_are_recommended_for(colored, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["recommend", colored.resolve().as_uri()]) == 0
    assert f"data.path={colored.resolve().as_uri()}" in capsys.readouterr().out


def test_options_that_it_does_not_have_are_named_as_those_of_prepare(tmp_path, capsys, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    photos = {f"Photos from {year}/{year}.png": encoded(picture(year % 50)) for year in (2019, 2020, 2021)}
    write_files(tmp_path / "years", photos)
    assert main(["recommend", "years"]) == 2
    said(capsys.readouterr().err.splitlines()[-1])


def test_labels_count_where_something_can_be_measured_with_them(tmp_path, monkeypatch):
    """Those of one class do not, nor does a test split without any."""
    monkeypatch.chdir(tmp_path)
    photos = {f"train/{name}/{n}.png": encoded(picture(n)) for name in ("cats", "dogs") for n in range(9)}
    photos |= {f"val/cats/{n}.png": encoded(picture(50 + n)) for n in range(6)}
    write_files(
        tmp_path / "mine", {**photos, **{f"test/{n}.png": encoded(picture(70 + n)) for n in range(4)}}
    )
    write_files(tmp_path / "one", {name: data for name, data in photos.items() if "cats" in name})
    for name, counts in (("mine", (18, 18, 2, 10, 6)), ("one", (9, 0, 1, 6, 6))):
        assert main(["prepare", name, f"data/{name}"]) == 0
        for path in (name, f"data/{name}"):
            with recommend.look_at(path) as images:
                found = images.train, images.labeled, images.classes, images.held_out, images.tested
                assert found == counts, path
    with recommend.look_at("data/one") as images:
        assert "no labels" in images.describe()


def test_runs_of_other_data_keep_their_folders(seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, preset = seen(64), recommend.PHOTOS_64
    kept = recommend._commands(images, preset, [])
    for name in (preset.pretrain, preset.finetune):
        write_files(tmp_path / "runs" / name, {"config.yaml": b"data: {path: photos}"})
    assert recommend._commands(images, preset, []) == kept
    pretrain, compare, tune = recommend._commands(replace(images, given="data/my cats"), preset, [])
    assert "run.name=mae_photos_64_my-cats" in pretrain
    assert "--ckpt runs/mae_photos_64_my-cats" in tune
    assert "run.name=finetune_photos_64_my-cats" in tune
    overrides = shlex.split(compare)[3:]
    config = load_config(CompareConfig, find_preset(preset.compare), overrides)
    assert config.run.name == "compare_photos_my-cats"
    assert config.pretrain["MAE"].dir == "runs/mae_photos_64_my-cats"


def test_commands_name_data_only_where_their_presets_read_other_data(seen):
    here = replace(seen(64), given="data/photos")
    assert "data.path" not in " ".join(recommend._commands(here, recommend.PHOTOS_64, []))
    assert "data.path=data/photos" in " ".join(recommend._commands(here, recommend.SMALL, []))
    for folder, preset in zip(("pretrain", "finetune"), recommend.PHOTOS_64, strict=False):
        assert "path: data/photos" in (recommend.PRESETS / folder / f"{preset}.yaml").read_text()


def test_few_images_begin_with_published_weights(tmp_path, seen, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos = {
        f"{name}/{n}.jpg": encoded(picture(n, (64, 64))) for name in ("cats", "dogs") for n in range(20)
    }
    write_files(tmp_path / "my photos", photos)
    assert main(["prepare", "my photos", "data/mine"]) == 0
    lines = recommend.recommend("data/mine")
    assert any("prepare the images again with --holdout 1/3" in line for line in lines)
    published, pretrain, *_ = (line.strip() for line in lines[lines.index("commands") + 1 :])
    assert "finetune.mode=knn data.path=data/mine" in published
    assert pretrain.startswith("mae-vit pretrain mae_photos_64")
    few = replace(seen(64), prepared=False, labeled=240, classes=2)
    assert warn_of_few(few).startswith("--holdout 1/3 gives 80 held-out images")
