"""Whole fine-tuning runs: what they leave, the choice of the epoch, one read of the test split, resume."""

import json
import math
import shutil

import numpy as np
import pytest
import timm
import torch
from helpers.commands import csv_rows, cut_back, lines_of, summary_of
from helpers.finetune import CNN, TINY
from helpers.leaked_tensors import Leftovers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mae_vit.data import training_data
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import TarIndex, open_index
from mae_vit.finetuning.data import FinetuneData
from mae_vit.pretraining.command import main as pretrain
from mae_vit.pretraining.report.page import write_page
from mae_vit.pretraining.report.run_record import read_run
from mae_vit.pretraining.report.verdict import verdict
from mae_vit.training.checkpoints.checkpoint import load_checkpoint
from mae_vit.training.trainer import Trainer

# What a resumed run may differ in: times.
CLOCKS = ("images_per_s", "wall_s", "data_wait_frac", "peak_memory_gib")
RESULTS = ("model.safetensors", "results.json", "predictions.csv")
NOISE = ["model.drop_path_rate=0.3", "optim.lr=3e-2"]


def test_a_run_leaves_what_it_promises(shared, digits, pretrained):
    folder, output, _ = shared(ckpt=pretrained)
    assert {path.name for path in folder.iterdir()} == {
        *(".lock", "config.yaml", "environment.json", "plan.txt", "metrics.jsonl", "checkpoints", "pictures"),
        *("summary.json", "results.json", "predictions.csv", "test_reads.json", "model.safetensors"),
    }
    assert "100.0%" in output
    assert "not loaded    fc_norm" in output
    assert "norm.weight + norm.bias" in output
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
    assert summary["test_reads"] == 1
    rows = csv_rows(folder / "predictions.csv")
    assert [row["key"] for row in rows] == test.keys()
    assert [row["label"] for row in rows] == [str(label) for label in test.labels]
    right = [row["label"] == row["prediction"] for row in rows]
    assert np.mean(right) == pytest.approx(summary["test_top1"])
    counts = np.array(results["confusion"])
    assert counts.sum() == len(rows)
    assert counts.trace() == sum(right)
    assert results["per_class"]["3"] == pytest.approx(counts[3, 3] / counts[3].sum())
    low, high = summary["interval_95"]
    assert low < summary["test_top1"] < high
    assert f"  95 %      {low:.1%} to {high:.1%}, " in output


@pytest.mark.parametrize("mode", ["finetune", "knn"])
def test_a_report_tells_the_score(shared, pretrained, mode):
    folder = shared(*(() if mode == "finetune" else ["finetune.mode=knn"]), ckpt=pretrained).folder
    summary, record = summary_of(folder), read_run(folder)
    low, high = summary["interval_95"]
    said, page = str(verdict(record)), write_page(record)
    begin = "Finished, 6 steps" if mode == "finetune" else "Finished"
    assert said.startswith(f"{begin}: {summary['test_top1']:.1%} of test images right.\n95 % interval")
    assert f": {low:.1%} to {high:.1%}." in said
    assert (f"mae-vit predict {folder}" in said) == (mode == "finetune")
    per_class = json.loads((folder / "results.json").read_text())["per_class"]
    assert f"<td>score by class: 3</td><td>{per_class['3']:.5g}</td>" in page
    assert "fine-tuning run" in page
    assert "Online probe:" not in page


def test_the_best_epoch_on_held_out_images_is_tested(shared):
    folder = shared(*NOISE).folder
    top1 = {line["step"]: line["heldout"]["top1"] for line in lines_of(folder) if "heldout" in line}
    best = max(top1, key=lambda step: (top1[step], -step))
    summary = summary_of(folder)
    assert (summary["best_step"], summary["val_top1"]) == (best, top1[best])
    state = load_checkpoint(folder / "checkpoints" / f"step-{best:08d}").state
    for name, value in load_file(folder / "model.safetensors").items():
        key = name if name in state.parameters else f"encoder.{name}"
        assert torch.equal(value, state.parameters[key]), name


def test_a_batch_larger_than_the_data_shrinks_with_a_note(call, tmp_path, capsys):
    """Without held-out images the last weights are tested; without a test nothing is read of its split."""
    assert call("data.labels_per_class=4", "finetune.holdout=0") == 0
    folder = tmp_path / "run"
    summary = summary_of(folder)
    (note,) = summary["notes"]
    assert "train.effective_batch_size=64" in note
    assert "32 images" in note
    assert f"note: {note}" in capsys.readouterr().out
    assert f"note: {note}" in (folder / "plan.txt").read_text()
    assert summary["samples"] == 6 * 32
    assert (summary["val_size"], summary["train_size"], summary["val_top1"]) == (0, 40, None)
    assert summary["best_step"] == 6


def test_the_test_split_is_not_read_without_being_asked_for(call, tmp_path, capsys):
    assert call("finetune.test=false") == 0
    assert "(finetune.test=false)" in capsys.readouterr().out
    summary = summary_of(tmp_path / "run")
    assert summary["val_top1"] > 0
    assert not any(name.startswith("test_top") for name in summary)
    assert not any((tmp_path / "run" / name).exists() for name in ("predictions.csv", "test_reads.json"))


def test_weights_that_are_tested_are_counted_once_each(call, tmp_path):
    """A run that was killed while it wrote its results measures its last checkpoint again; a longer one another."""
    assert call() == 0
    path = tmp_path / "run" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running"}))
    assert call() == 0
    assert summary_of(tmp_path / "run")["test_reads"] == 1
    assert call("train.steps=9", "--extend") == 0
    assert summary_of(tmp_path / "run")["test_reads"] == 2


def test_each_split_is_read_for_what_it_is(call, digits, monkeypatch, spy):
    """Training touches no held-out image; nothing reads the test split, not even to decode it, before the end."""
    shutil.rmtree(digits / ".index", ignore_errors=True)
    seen, decoded, trained, taken, saves = {"train": [], "test": []}, [], [], [], []
    load = training_data.load_batches

    def loaded(source, *arguments, **options):
        for batch in load(source, *arguments, **options):
            trained.extend(source.samples[batch.keys.index.numpy()])
            yield batch

    def rendered(source, seed, epoch, places, *_, **options):
        # The decoded array is a cache: what goes through the source counts.
        seen[source.source.index.split] += list(source.numbers(places))

    def saved(trainer, step, **options):
        saves.append((step, [split for split, _ in decoded].count("test")))

    monkeypatch.setattr(training_data, "load_batches", loaded)
    spy(AugmentedSource, "render", rendered)
    spy(TarIndex, "read", lambda index, n: decoded.append((index.split, n)))
    spy(FinetuneData, "held_out_batches", lambda data, *_, **more: taken.append((data.train, data.held_out)))
    spy(Trainer, "save", saved)
    options = ["train.steps=42", "checkpoint.every_steps=21", "monitor.evaluate_every_steps=21"]
    assert call(*options) == 0
    assert saves == [(0, 0), (21, 0), (42, 0)]
    total = len(open_index(digits, "test"))
    assert sorted(seen["test"]) == list(range(total))
    assert sorted(number for split, number in decoded if split == "test") == list(range(total))
    train, chosen = (set(samples.tolist()) for samples in taken[0])
    assert not train & chosen
    assert len(train | chosen) == 1497
    assert set(trained) <= train
    assert len(set(trained)) > 0.9 * len(train)
    # A finished run does not look again.
    assert call(*options) == 0
    assert len(seen["test"]) == total


KILLED = {
    "noise": NOISE,
    "network": [],
    "average": ["train.ema_decay=0.7"],
    "mixing": ["finetune.mixup=0.8", "finetune.cutmix=1.0"],
}


@pytest.mark.parametrize("kind", KILLED)
@pytest.mark.parametrize("left", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_changes_nothing(call, shared, tmp_path, kind, left):
    changes, options = KILLED[kind], CNN if kind == "network" else {}
    straight, cut = shared(*changes, **options).folder, tmp_path / "cut"
    shutil.copytree(straight, cut)
    cut_back(cut, left)
    assert call(*changes, "run.name=run", name="cut", **options) == 0
    for name in RESULTS:
        assert (cut / name).read_bytes() == (straight / name).read_bytes(), name
    ours, theirs = ({k: v for k, v in summary_of(at).items() if k not in CLOCKS} for at in (cut, straight))
    assert ours == theirs
    kept = ("step", "loss", "lr", "grad_norm", "heldout", "accuracy")
    assert [[line.get(k) for k in kept] for line in lines_of(cut)] == [
        [line.get(k) for k in kept] for line in lines_of(straight)
    ]


def test_the_best_weights_travel_with_the_checkpoint_and_nothing_else_stays(call, tmp_path, monkeypatch):
    """The best came before the save that another folder resumes from."""
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


def test_other_weights_are_another_run(call, shared, pretrained, tmp_path, capsys):
    shutil.copytree(shared(ckpt=pretrained).folder, tmp_path / "run")
    moved = shutil.copytree(pretrained, tmp_path / "moved")
    assert call(ckpt=moved) == 0
    assert "is finished" in capsys.readouterr().out
    # Of the same name: what was begun from others does not resume.
    shutil.rmtree(moved / "checkpoints")
    tensors = load_file(moved / "encoder.safetensors")
    tensors["cls_token"] = tensors["cls_token"] + 1
    with safe_open(moved / "encoder.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, moved / "encoder.safetensors", metadata=metadata)
    assert call(ckpt=moved) == 2
    assert "--ckpt (the digest" in capsys.readouterr().err


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_the_model_is_timms(shared, digits, pretrained, pool):
    from mae_vit.data.batches.sources import decode_sample

    folder = shared(*([] if pool == "mean" else ["finetune.pool=cls"]), ckpt=pretrained).folder
    options = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    pooled = {"cls": "token", "mean": "avg"}[pool]
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, global_pool=pooled, **options)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    index = open_index(digits, "test")
    images = torch.from_numpy(np.stack([decode_sample(index, i, 1) for i in range(len(index))])).float() / 255
    with torch.no_grad():
        scores = model.eval()((images - index.dataset.mean[0]) / index.dataset.std[0])
    right = (scores.argmax(dim=-1).numpy() == index.labels).mean()
    assert right == pytest.approx(summary_of(folder)["test_top1"])


def test_every_option_of_fine_tuning_changes_the_model(call, shared, pretrained, tmp_path):
    base = shared("finetune.holdout=0", ckpt=pretrained).folder
    seen = {(base / "model.safetensors").read_bytes()}
    changes = (
        ["optim.layer_decay=0.5"],
        ["finetune.head_init=small", "finetune.label_smoothing=0.0"],
        ["finetune.cutmix=1.0"],
        ["finetune.mixup=0.2", "train.precision=bf16"],
    )
    for number, change in enumerate(changes, start=1):
        assert call("finetune.holdout=0", *change, name=str(number), ckpt=pretrained) == 0
        seen.add((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert len(seen) == len(changes) + 1


def test_weights_that_have_seen_the_held_out_labels_are_reported(call, digits, tmp_path, capsys):
    """The images that choose the epoch are no held-out images for weights trained on their labels."""
    folder = tmp_path / "supervised"
    short = ["train.engine=torch", "train.steps=2", "train.warmup_steps=1", "monitor.tensorboard=false"]
    fit = ["data.augment={crop: none, flip: false}", "train.effective_batch_size=64", "train.precision=fp32"]
    place = [f"data.path={digits}", f"run.dir={folder}"]
    assert pretrain(["--config", "supervised_cifar_tiny", *TINY, *short, *fit, *place]) == 0
    assert call("data.labels_per_class=20", ckpt=folder / "encoder.safetensors") == 0
    assert "too good" in capsys.readouterr().err
    assert summary_of(tmp_path / "run")["labels_seen_by_start"] == "held-out"
