"""Whole fine-tuning runs: what they leave, the choice of the epoch, one read of the test split, resume."""

import csv
import json
import math
import re
import shutil

import numpy as np
import pytest
import timm
import torch
from helpers.commands import ROOT, lines_of, summary_of
from helpers.finetune import TINY
from helpers.leaked_tensors import Leftovers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mae_vit.data import training_data
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.finetuning import data as finetune_data
from mae_vit.pretraining.command import main as pretrain
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint

# What a resumed run may differ in: times.
CLOCKS = ("images_per_s", "wall_s", "data_wait_frac", "peak_memory_gib")
SEEN: list[bytes] = []
# The model of unchanged options, made once for each start.
BASES: dict[tuple, bytes] = {}


def test_a_run_leaves_what_it_promises(call, digits, pretrained, tmp_path, capsys):
    assert call(ckpt=pretrained) == 0
    folder, output = tmp_path / "run", capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "config.yaml",
        "environment.json",
        "plan.txt",
        "metrics.jsonl",
        "checkpoints",
        "pictures",
        "summary.json",
        "results.json",
        "predictions.csv",
        "test_reads.json",
        "rates.json",
        "model.safetensors",
    }
    assert "100.0% of the encoder's parameters" in output
    assert "not loaded    fc_norm" in output
    assert "norm.weight + norm.bias (final norm, dropped" in output
    assert f"run         {folder}, from {pretrained}, seed 0\n" in (folder / "plan.txt").read_text()
    summary, results = summary_of(folder), json.loads((folder / "results.json").read_text())
    assert (summary["status"], summary["steps"], summary["seed"]) == ("done", 6, 0)
    test = open_index(digits, "test")
    sizes = summary["train_size"], summary["val_size"], summary["test_size"]
    assert sizes == (1497 - sizes[1], sizes[1], len(test))
    assert 140 <= sizes[1] <= 155
    for name in ("train_top1", "val_top1", "test_top1", "test_top5", "calibration_error"):
        assert math.isfinite(summary[name]), name
        assert 0 <= summary[name] <= 1, name
    assert summary["train_test_gap"] == pytest.approx(summary["train_top1"] - summary["test_top1"])
    assert "fitting" in summary["reading"]
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == test.keys()
    assert [row["label"] for row in rows] == [str(label) for label in test.labels]
    right = [row["label"] == row["prediction"] for row in rows]
    assert np.mean(right) == pytest.approx(summary["test_top1"])
    counts = np.array(results["confusion"])
    assert counts.sum() == len(rows)
    assert counts.trace() == sum(right)
    assert results["per_class"]["3"] == pytest.approx(counts[3, 3] / counts[3].sum())


def test_the_best_epoch_on_held_out_images_is_tested(call, tmp_path):
    assert call("optim.lr=3e-2", "train.steps=12") == 0
    top1_of = {
        line["step"]: line["heldout"]["top1"] for line in lines_of(tmp_path / "run") if "heldout" in line
    }
    best = max(top1_of, key=lambda step: (top1_of[step], -step))
    summary = summary_of(tmp_path / "run")
    assert (summary["best_step"], summary["val_top1"]) == (best, top1_of[best])
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best:08d}").state
    model = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in model.items():
        key = name if name in state.parameters else f"encoder.{name}"
        assert torch.equal(value, state.parameters[key]), name


def test_a_batch_larger_than_the_data_shrinks_with_a_note(call, tmp_path, capsys):
    assert call("data.labels_per_class=4", "finetune.holdout=0") == 0
    folder = tmp_path / "run"
    (note,) = summary_of(folder)["notes"]
    assert note.startswith("train.effective_batch_size=64 is larger than the data")
    assert note.endswith("has 40 images to train on: a batch is 32 images, the largest power of two")
    assert f"note: {note}" in capsys.readouterr().out
    assert f"note: {note}" in (folder / "plan.txt").read_text()
    assert summary_of(folder)["samples"] == 6 * 32


def test_without_held_out_images_the_last_weights_are_tested(call, tmp_path):
    assert call("finetune.holdout=0") == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["val_size"], summary["train_size"], summary["val_top1"]) == (0, 1497, None)
    assert summary["best_step"] == 6


class Reads:
    """Counts what is read of each split, in images' bytes and through sources."""

    def __init__(self, monkeypatch) -> None:
        self.seen: dict[str, list[int]] = {"train": [], "test": []}
        seen, render = self.seen, AugmentedSource.render

        def counted(source, seed, epoch, places, *more, **options):
            # The decoded array is a cache: what goes through the source counts.
            seen[source.source.index.split] += list(source.numbers(places))
            return render(source, seed, epoch, places, *more, **options)

        monkeypatch.setattr(AugmentedSource, "render", counted)
        read = ShardIndex.read

        def read_counted(index, sample):
            self.bytes_read.append((index.split, sample))
            return read(index, sample)

        self.bytes_read: list[tuple[str, int]] = []
        monkeypatch.setattr(ShardIndex, "read", read_counted)


def test_the_test_split_is_read_once_at_the_end(call, digits, tmp_path, monkeypatch):
    shutil.rmtree(digits / ".index", ignore_errors=True)
    reads = Reads(monkeypatch)
    measured = []
    from mae_vit.training.trainer import Trainer

    save = Trainer.save

    def noted(self, step, **how):
        measured.append((step, len(reads.seen["test"])))
        assert not [split for split, _ in reads.bytes_read if split == "test"]
        return save(self, step, **how)

    monkeypatch.setattr(Trainer, "save", noted)
    assert call() == 0
    # Nothing of it, not even for decoding, until the last step was saved; then each once.
    assert measured == [(0, 0), (2, 0), (4, 0), (6, 0)]
    total = len(open_index(digits, "test"))
    assert sorted(reads.seen["test"]) == list(range(total))
    assert sorted(sample for split, sample in reads.bytes_read if split == "test") == list(range(total))
    # A finished run does not look again.
    assert call() == 0
    assert len(reads.seen["test"]) == total


def test_training_touches_no_held_out_image(call, digits, monkeypatch):
    config_data = []
    opened = training_data.load_batches

    def noted(source, *arguments, **options):
        for batch in opened(source, *arguments, **options):
            config_data.append((source, batch.keys.index.clone()))
            yield batch

    monkeypatch.setattr(training_data, "load_batches", noted)
    taken = []
    measured = finetune_data.FinetuneData.held_out_batches

    def held(self, *arguments, **options):
        taken.append((set(self.train.tolist()), set(self.held_out.tolist())))
        return measured(self, *arguments, **options)

    monkeypatch.setattr(finetune_data.FinetuneData, "held_out_batches", held)
    assert call("train.steps=42") == 0
    (train, held_out) = taken[0]
    assert not train & held_out
    assert len(train | held_out) == 1497
    seen = {int(config_data[0][0].samples[place]) for _, index in config_data for place in index}
    assert seen <= train
    assert len(seen) > 0.9 * len(train)


def strip(summary: dict) -> dict:
    return {key: value for key, value in summary.items() if key not in CLOCKS}


@pytest.mark.parametrize("kind", ["pretrained", "noise", "network"])
@pytest.mark.parametrize("left", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_changes_nothing(call, pretrained, tmp_path, kind, left):
    options = {
        "pretrained": {"ckpt": pretrained},
        "noise": {},
        "network": {"config": "simple_cnn_cifar", "model": TINY[:1] + TINY[2:3]},
    }[kind]
    changes = ["model.drop_path_rate=0.3", "optim.lr=3e-2"] if kind == "noise" else ["optim.lr=3e-2"]
    assert call(*changes, name="straight", **options) == 0
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    shutil.copytree(straight, cut)
    # As after a power cut behind this save: metrics may be ahead of it, results are not there.
    for path in list_checkpoints(cut / "checkpoints"):
        if int(path.name.removeprefix("step-")) > left:
            shutil.rmtree(path)
    for name in ("model.safetensors", "results.json", "predictions.csv"):
        (cut / name).unlink()
    (cut / "summary.json").write_text(json.dumps({"status": "running"}))
    assert call(*changes, "run.name=straight", name="cut", **options) == 0
    for name in ("model.safetensors", "results.json", "predictions.csv"):
        assert (cut / name).read_bytes() == (straight / name).read_bytes(), name
    assert strip(summary_of(cut)) == strip(summary_of(straight))
    kept = ("step", "loss", "lr", "grad_norm", "heldout", "accuracy")
    assert [[line.get(k) for k in kept] for line in lines_of(cut)] == [
        [line.get(k) for k in kept] for line in lines_of(straight)
    ]


def test_the_best_weights_travel_with_the_checkpoint_and_nothing_else_stays(call, tmp_path, monkeypatch):
    """The best came before the save that another folder goes on from."""
    options = ["optim.lr=0.1", "train.steps=12"]
    assert call(*options, name="straight") == 0
    best = summary_of(tmp_path / "straight")["best_step"]
    assert best < 12, "choose a rate at which the last weights are not the best"
    middle = tmp_path / "straight" / "checkpoints" / f"step-{max(best, 10):08d}"
    left = Leftovers(monkeypatch)
    assert call(*options, "--resume", str(middle), "run.name=straight", name="rest") == 0
    assert len(left.read) > 40
    assert left.alive == [0]
    assert summary_of(tmp_path / "rest")["best_step"] == best
    for name in ("model.safetensors", "predictions.csv"):
        assert (tmp_path / "rest" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_another_start_is_another_run(call, pretrained, tmp_path, capsys):
    assert call(ckpt=pretrained) == 0
    moved = shutil.copytree(pretrained, tmp_path / "moved")
    capsys.readouterr()
    assert call(ckpt=moved) == 0
    assert "is finished" in capsys.readouterr().out
    # A start of other weights under the same name: what was begun from another does not go on.
    shutil.rmtree(moved / "checkpoints")
    tensors = load_file(moved / "encoder.safetensors")
    tensors["cls_token"] = tensors["cls_token"] + 1
    with safe_open(moved / "encoder.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, moved / "encoder.safetensors", metadata=metadata)
    assert call(ckpt=moved) == 2
    assert "finetune.start_digest was " in capsys.readouterr().err


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_the_model_is_timms(call, digits, pretrained, tmp_path, pool):
    assert call(f"finetune.pool={pool}", ckpt=pretrained) == 0
    options = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=10,
        global_pool={"cls": "token", "mean": "avg"}[pool],
        **options,
    )
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"), strict=True)
    model.eval()
    index = open_index(digits, "test")
    from mae_vit.data.batches.sources import decode_sample

    images = torch.from_numpy(np.stack([decode_sample(index, i, 1) for i in range(len(index))])).float() / 255
    mean, std = index.dataset.mean[0], index.dataset.std[0]
    with torch.no_grad():
        guesses = model((images - mean) / std).argmax(dim=-1).numpy()
    assert (guesses == index.labels).mean() == pytest.approx(summary_of(tmp_path / "run")["test_top1"])


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=5",
        "optim.lr=1e-3",
        "optim.betas=[0.9, 0.95]",
        "optim.weight_decay=0.9",
        "optim.clip_grad=0.01",
        "optim.layer_decay=0.5",
        "optim.name=sgd",
        "optim.name=sgd optim.momentum=0.5",
        "train.precision=bf16",
        "data.labels_per_class=50",
        "data.augment.crop=none",
        "data.augment.flip=true",
        "finetune.holdout=0.3",
        "finetune.pool=cls",
        "finetune.head_init=small",
        "finetune.label_smoothing=0.0",
        "finetune.mixup=0.8",
        "finetune.cutmix=1.0",
        "finetune.mixup=0.8 finetune.cutmix=1.0",
        "finetune.mixup=0.2",
        "finetune.freeze_patch_embed=true",
        "train.ema_decay=0.9",
        "train.ema_decay=0.2",
        "model.drop_path_rate=0.2",
        "model.pos_embed=sincos",
    ],
)
def test_every_option_changes_the_model(call, pretrained, tmp_path, change):
    start = None if "sincos" in change else pretrained
    # Of the last weights: the best may be from before an option shows.
    fixed = ["train.steps=4", "checkpoint.every_steps=4"]
    fixed += [] if "holdout" in change else ["finetune.holdout=0"]
    base = (start, *fixed)
    if base not in BASES:
        assert call(*fixed, name="base", ckpt=start) == 0
        BASES[base] = (tmp_path / "base" / "model.safetensors").read_bytes()
    assert call(*fixed, *re.split(r" (?=\w+\.\w+=)", change), name="changed", ckpt=start) == 0
    changed = (tmp_path / "changed" / "model.safetensors").read_bytes()
    assert changed != BASES[base]
    assert changed not in SEEN
    SEEN.append(changed)


@pytest.mark.parametrize("mode", ["few_shot", "knn"])
def test_frozen_features_are_scored(call, pretrained, tmp_path, capsys, mode):
    before = {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()}
    assert call(f"finetune.mode={mode}", ckpt=pretrained) == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["train_size"], summary["val_size"]) == ("done", 1497, 0)
    # Even random features tell digits apart far above the 10 % of chance.
    assert 0.2 < summary["test_top1"] <= 1
    if mode == "few_shot":
        assert list(summary["few_shot"]) == ["1", "5", "10", "25"]
        means = [scores["mean"] for scores in summary["few_shot"].values()]
        assert means[0] < means[-1]
        for scores in summary["few_shot"].values():
            assert scores["mean"] == pytest.approx(np.mean(scores["draws"]))
            assert scores["std"] == pytest.approx(np.std(scores["draws"], ddof=1))
            assert len(set(scores["draws"])) > 1
    capsys.readouterr()
    assert call(f"finetune.mode={mode}", ckpt=pretrained) == 0
    assert "is finished" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()} == before


def test_frozen_options_have_effects(call, pretrained, tmp_path):
    base = ["finetune.mode=few_shot", "finetune.shots=[5]", "finetune.draws=2"]
    changes = {
        "base": base,
        "shots": [*base, "finetune.shots=[6]"],
        "draws": [*base, "finetune.draws=3"],
        "pool": [*base, "finetune.pool=cls"],
        "labels": [*base, "data.labels_per_class=30"],
        "knn": ["finetune.mode=knn"],
        "neighbors": ["finetune.mode=knn", "finetune.neighbors=3"],
    }
    seen = {}
    for name, change in changes.items():
        assert call(*change, name=name, ckpt=pretrained) == 0
        summary = summary_of(tmp_path / name)
        seen[name] = json.dumps(summary.get("few_shot")) + (tmp_path / name / "predictions.csv").read_text()
    assert len(set(seen.values())) == len(seen)


def test_the_test_split_is_read_once_by_frozen_modes(call, digits, pretrained, monkeypatch):
    reads = Reads(monkeypatch)
    assert call("finetune.mode=few_shot", ckpt=pretrained) == 0
    # By the encoder, and by the same network with random weights.
    assert sorted(reads.seen["test"]) == sorted(2 * list(range(len(open_index(digits, "test")))))


@pytest.mark.parametrize(("left_out", "seen"), [(None, "held-out"), (10, "held-out"), (20, "others")])
def test_a_start_that_has_seen_the_held_out_labels_is_reported(
    call, digits, tmp_path, capsys, left_out, seen
):
    """The images that choose the epoch are no held-out images for a start trained on their labels."""
    folder = tmp_path / "supervised"
    short = ["train.engine=torch", "train.steps=2", "train.warmup_steps=1", "monitor.tensorboard=false"]
    fit = ["data.augment={crop: none, flip: false}", "train.effective_batch_size=64", "train.precision=fp32"]
    option = [] if left_out is None else [f"data.leave_out_per_class={left_out}"]
    config = str(ROOT / "configs" / "pretrain" / "supervised_cifar_tiny.yaml")
    place = [f"data.path={digits}", f"run.dir={folder}"]
    assert pretrain(["--config", config, *TINY, *short, *fit, *option, *place]) == 0
    for name, start in (("run", folder), ("exported", folder / "encoder.safetensors")):
        assert call("data.labels_per_class=20", name=name, ckpt=start) == 0
        assert ("and flatter it" in capsys.readouterr().err) == (seen == "held-out")
        assert summary_of(tmp_path / name)["labels_seen_by_start"] == seen
