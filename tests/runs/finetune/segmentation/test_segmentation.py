"""Whole runs of segmentation, its split of a batch, and what is refused."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, lines_of, one_line
from helpers.finetune import SMALL, TINY
from helpers.images import FIRST, STEP
from safetensors.torch import load_file

from mae_vit.cli.main import main as command_line
from mae_vit.finetuning.command import main
from mae_vit.weights.encoder import load_encoder


@pytest.fixture
def segment(pairs, tmp_path):
    """Runs a mode of segmentation: segment("key=value", ..., mode="segment", name="run", ckpt=None)."""

    def call(
        *arguments, mode="segment", name="run", ckpt=None, config="finetune_cifar_tiny", model=TINY
    ) -> int:
        start = ["--ckpt", str(ckpt)] if ckpt else []
        options = [
            f"data.path={pairs}",
            f"run.dir={tmp_path / name}",
            f"run.name={name}",
            f"finetune.mode={mode}",
        ]
        options += (
            ["train.effective_batch_size=8", "finetune.pool=cls"]
            if model
            else ["train.effective_batch_size=8"]
        )
        geometry = ["model.img_size=8"] if ckpt else model or ["model.img_size=8", "model.in_chans=1"]
        file = str(ROOT / "configs" / f"{config}.yaml")
        return main(["--config", file, *start, *SMALL, *geometry, *options, *arguments])

    return call


def test_a_run_from_a_start(segment, pretrained, tmp_path, capsys):
    """The encoder of a probe stays as it was; the files agree with each other."""
    assert segment("train.steps=12", mode="segment_probe", name="probe", ckpt=pretrained) == 0
    output = capsys.readouterr().out
    assert "decode_head (fresh" in output
    folder = tmp_path / "probe"
    summary, details = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "results"))
    assert f"mIoU {summary['test_miou']:.2%}" in output
    assert summary["mode"] == "segment_probe"
    assert 0 < summary["test_miou"] <= 1
    assert details["per_class"].keys() == {"ground", "thing 1", "thing 2"}
    known = [iou for iou in details["per_class"].values() if iou is not None]
    assert summary["test_miou"] == pytest.approx(np.mean(known))
    with np.load(folder / "images.npz") as arrays:
        assert arrays["intersections"].sum(axis=0) / arrays["unions"].sum(axis=0) == pytest.approx(known)
        assert arrays["pixels"].shape == (8, 1, 8, 8)
        gray = arrays["pixels"][:, 0].astype(int)
        # The image tells the class, so truth and pixels are of the same images.
        np.testing.assert_array_equal(arrays["truth"], np.where(gray < FIRST, -1, (gray - FIRST) // STEP))
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    assert len(rows) == summary["test_size"] == 24
    assert (folder / "overlays.png").stat().st_size > 500
    assert {"loss", "miou", "pixel_accuracy"} <= lines_of(folder)[-1]["heldout"].keys()
    before, after = load_file(pretrained / "encoder.safetensors"), load_file(folder / "model.safetensors")
    for name, tensor in load_encoder(pretrained).encoder.state_dict().items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0)
    assert before.keys() & after.keys()
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(load_encoder(folder)(images), load_encoder(pretrained)(images))
    capsys.readouterr()
    assert command_line(["export", str(folder), "--to", "timm", "--out", str(tmp_path / "timm")]) == 0
    said = "without the head of its masks, which the run's model.safetensors has"
    assert said in capsys.readouterr().out
    assert said[1:] in (tmp_path / "timm" / "README.md").read_text()


def test_a_frozen_projection_stays(segment, pretrained, tmp_path):
    assert segment("finetune.freeze_patch_embed=true", ckpt=pretrained) == 0
    start, model = (
        load_file(folder / name)
        for folder, name in ((pretrained, "encoder.safetensors"), (tmp_path / "run", "model.safetensors"))
    )
    shared = start.keys() & model.keys()
    for name in shared:
        assert torch.equal(start[name], model[name]) == name.startswith("patch_embed."), name
    assert sum(name.startswith("patch_embed.") for name in shared) == 2


@pytest.mark.slow
def test_a_run_learns_and_resumes(segment, tmp_path, capsys):
    """The gray value tells the class, so that it is learned; resuming halfway gives the same bits."""
    options = ["train.steps=80", "train.warmup_steps=4", "optim.lr=5e-3", "checkpoint.every_steps=40"]
    quiet = ["monitor.evaluate_every_steps=40", "monitor.log_every_steps=40", "finetune.label_smoothing=0"]
    assert segment(*options, *quiet) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_miou"] > 0.8
    assert summary["val_miou"] == max(
        line["heldout"]["miou"] for line in lines_of(tmp_path / "run") if "heldout" in line
    )
    whole = load_file(tmp_path / "run" / "model.safetensors")
    halves = tmp_path / "halves"
    shutil.copytree(tmp_path / "run", halves)
    for path in (halves / "checkpoints").iterdir():
        if "80" in path.name:
            shutil.rmtree(path)
    for name in ("summary.json", "results.json", "model.safetensors"):
        (halves / name).unlink()
    assert segment(*options, *quiet, name="halves") == 0
    assert "resum" in capsys.readouterr().out
    again = load_file(halves / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_network_is_trained_from_scratch(segment, tmp_path):
    assert segment(config="small_resnet_cifar", model=None) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["model"] == "SmallResNet"
    assert 0 <= summary["test_miou"] <= 1


def test_a_dry_run_tells_the_plan(segment, tmp_path, capsys):
    assert segment("--dry-run", "optim.layer_decay=0.8", mode="segment_probe") == 0
    output = capsys.readouterr().out
    assert "22 images of 3 classes" in output
    assert "linear head on the frozen encoder" in output
    assert "optim.layer_decay=0.8: no effect with finetune.mode=segment_probe" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["finetune.mixup=0.8"], "finetune.mixup=0.8 changes images without their masks"),
        (["data.augment.policy=randaugment"], "data.augment.policy=randaugment changes images without"),
        (["data.augment.erasing=0.25"], "data.augment.erasing=0.25 changes images without"),
    ],
)
def test_what_moves_pixels_is_refused(segment, capsys, options, said):
    assert segment(*options) == 2
    assert said in one_line(capsys)


def test_data_without_labels_name_the_modes_of_masks(segment, tmp_path, capsys):
    assert segment(mode="finetune") == 2
    assert "has no labels to measure by: its masks take finetune.mode=segment" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_data_without_masks_are_refused(call, tmp_path, capsys):
    assert call("finetune.mode=segment", "finetune.pool=cls") == 2
    assert "has no masks" in one_line(capsys)
    assert not (tmp_path / "run").exists()
