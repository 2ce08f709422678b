"""Whole runs of segmentation, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import csv_rows, cut_back, lines_of, one_line, summary_of
from helpers.damage import copy_of, description
from helpers.finetune import CNN
from helpers.images import FIRST, STEP, prepare_pairs, write_pairs
from PIL import Image
from safetensors.torch import load_file

from mae_vit.cli.main import main as command_line
from mae_vit.core.errors import InputError
from mae_vit.evaluation.segmentation import Overlaps
from mae_vit.finetuning.models.classifier_file import (
    ImageSegmenter,
    load_classifier,
    load_segmenter,
)
from mae_vit.finetuning.results import MaskResults
from mae_vit.runtime.ranks import Ranks
from mae_vit.weights.encoder import load_encoder

RESNET = {**CNN, "config": "small_resnet_cifar"}


@pytest.fixture
def segment(call, pairs):
    """Runs a mode of segmentation: segment("key=value", ..., mode="segment", name="run", ckpt=None)."""

    def run(*arguments, mode="segment", **options) -> int:
        own = f"data.path={pairs}", f"finetune.mode={mode}", "train.effective_batch_size=8"
        return call(*own, *arguments, **options)

    return run


def check_loaded(folder) -> ImageSegmenter:
    """The loaded network predicts what the run predicted."""
    network = load_segmenter(folder)
    with np.load(folder / "images.npz") as arrays:
        for image, predicted in zip(arrays["pixels"], arrays["predicted"], strict=True):
            np.testing.assert_array_equal(network.segment(image[0]), predicted)
    return network


def test_a_probe_of_pretrained_weights(segment, pretrained, tmp_path, capsys):
    """The encoder stays as it was; the files agree with each other."""
    options = ["train.steps=12", "optim.layer_decay=0.5"]  # without effect: the encoder is not trained
    assert segment(*options, mode="segment_probe", name="probe", ckpt=pretrained) == 0
    output = capsys.readouterr().out
    assert "\nlr " not in output
    assert "decode_head (new" in output
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
    assert len(csv_rows(folder / "predictions.csv")) == summary["test_size"] == 24
    assert (folder / "overlays.png").stat().st_size > 500
    assert {"loss", "miou", "pixel_accuracy"} <= lines_of(folder)[-1]["heldout"].keys()
    after = load_file(folder / "model.safetensors")
    for name, tensor in load_encoder(pretrained).encoder.state_dict().items():
        assert torch.equal(after[name], tensor), name
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(load_encoder(folder)(images), load_encoder(pretrained)(images))
    network = check_loaded(folder)
    assert network.classes == ("ground", "thing 1", "thing 2")
    torch.testing.assert_close(network.patch_map(images), load_encoder(pretrained).patch_map(images))
    capsys.readouterr()
    assert command_line(["export", str(folder), "--to", "timm", "--out", str(tmp_path / "timm")]) == 0
    assert "without the head" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_learns_and_resumes(segment, tmp_path, capsys):
    """The gray value tells the class, so that it is learned; resuming halfway gives the same bits."""
    options = ["train.steps=80", "train.warmup_steps=4", "optim.lr=5e-3", "checkpoint.every_steps=40"]
    quiet = ["monitor.evaluate_every_steps=40", "monitor.log_every_steps=40", "finetune.label_smoothing=0"]
    assert segment(*options, *quiet) == 0
    summary = summary_of(tmp_path / "run")
    assert summary["test_miou"] > 0.8
    held_out = [line["heldout"]["miou"] for line in lines_of(tmp_path / "run") if "heldout" in line]
    assert summary["val_miou"] == max(held_out)
    whole = load_file(tmp_path / "run" / "model.safetensors")
    halves = shutil.copytree(tmp_path / "run", tmp_path / "halves")
    cut_back(halves, 40)
    assert segment(*options, *quiet, name="halves") == 0
    assert "resum" in capsys.readouterr().out
    again = load_file(halves / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_masks_of_another_meaning_make_another_run(segment, pairs, tmp_path, capsys, said):
    """The shards are the same."""
    words = ["train.steps=1", "train.warmup_steps=0", f"data.path={copy_of(pairs, tmp_path / 'data')}"]
    assert segment(*words) == segment(*words) == 0
    with description(tmp_path / "data") as described:
        described["segmentation"]["ids"] = [1, 0, 2]
    capsys.readouterr()
    assert segment(*words) == 2
    said(one_line(capsys))


def test_a_split_without_masks_is_not_tested(segment, pairs, tmp_path, capsys, said):
    words = ["--dry-run", f"data.path={copy_of(pairs, tmp_path / 'data')}"]
    with description(tmp_path / "data") as described:
        splits = described["splits"]
        splits["val"] = {**splits["test"]}
        del splits["test"]["masks"]
    assert segment(*words) == 0
    assert "val" in capsys.readouterr().out
    with description(tmp_path / "data") as described:
        del described["splits"]["val"]
    assert segment(*words) == 2
    said(one_line(capsys))


def test_a_network_is_trained_from_scratch_and_from_weights_of_its_own(segment, call, tmp_path, capsys, said):
    assert call("train.steps=1", "train.warmup_steps=0", name="classifier", **RESNET) == 0
    assert segment(**RESNET) == 0
    assert segment(name="again", ckpt=tmp_path / "classifier", config=RESNET["config"]) == 0
    assert "100.0%" in capsys.readouterr().out
    for name in ("run", "again"):
        summary = summary_of(tmp_path / name)
        assert summary["model"] == "SmallResNet"
        assert 0 <= summary["test_miou"] <= 1
        check_loaded(tmp_path / name)
    for load, name in ((load_classifier, "run"), (load_segmenter, "classifier")):
        with pytest.raises(InputError) as refused:
            load(tmp_path / name)
        said(refused)


def test_images_of_bands_are_segmented(segment, tmp_path):
    folder, rng = write_pairs(tmp_path / "in"), np.random.default_rng(0)
    for file in (folder / "images").rglob("*.png"):
        bands = rng.integers(3000, 5000, (4, 8, 8)).astype(np.uint16)
        bands[2] = 1000 + np.asarray(Image.open(file), np.uint16)
        np.save(file.with_suffix(".npy"), bands)
        file.unlink()
    prepare_pairs(folder, tmp_path / "out")
    options = ["data.path=" + str(tmp_path / "out"), "train.steps=60", "model.in_chans=4", "optim.lr=3e-3"]
    assert segment(*options, "monitor.picture_bands=[3]") == 0
    # Only the third band tells the classes; read as 8 bits, its values are nearly equal.
    assert summary_of(tmp_path / "run")["test_miou"] > 0.6
    with np.load(tmp_path / "run" / "images.npz") as arrays:
        gray, truth = arrays["pixels"], arrays["truth"]
    assert gray.shape == (8, 1, 8, 8)
    means = [gray[:, 0][truth == k].mean() for k in range(3)]
    assert means == sorted(means)
    assert means[2] - means[0] > 150
    # Each pixel is enlarged to a square; the network sees the box in the middle.
    network, image = load_segmenter(tmp_path / "run"), folder / "images" / "test" / "0.npy"
    enlarged = np.pad(np.load(image).repeat(4, 1).repeat(4, 2), ((0, 0), (0, 0), (6, 6)))
    classes = network.segment(enlarged)
    assert classes.shape == (32, 44)
    assert (classes[:, :6] == -1).all()
    assert (classes[:, -6:] == -1).all()
    inside, truth = classes[2::4, 8:38:4], np.asarray(Image.open(folder / "masks" / "test" / "0.png"))
    assert (inside == network.segment(image)).mean() > 0.9
    assert (inside == truth).mean() > 0.6


def test_files_of_several_ranks_and_of_images_without_pixels_that_count(segment, spy, tmp_path):
    made = []
    spy(MaskResults, "predict_some", lambda *arguments: made.append(arguments))
    assert segment("train.steps=1", "train.warmup_steps=0") == 0
    (results, model, source), counts = made[0], np.ones((24, 3))
    ranks = replace(results, setup=replace(results.setup, ranks=Ranks(0, 2, 0, 2)))
    shown = ranks.predict_some(model, source)
    assert len(shown["pixels"]) == 8
    counts[5] = 0
    results.write_test(Overlaps(counts, counts), {}, shown)
    rows = csv_rows(tmp_path / "run" / "predictions.csv")
    assert [n for n, row in enumerate(rows) if not row["miou"] and not row["pixel_accuracy"]] == [5]
    assert rows[4]["miou"] == "1.000000"


def test_a_dry_run_tells_the_plan(segment, tmp_path, capsys):
    assert segment("--dry-run", "optim.layer_decay=0.8", mode="segment_probe") == 0
    output = capsys.readouterr().out
    for part in ("22 images of", "linear head", "optim.layer_decay=0.8: no effect"):
        assert part in output
    assert not (tmp_path / "run").exists()


def test_data_without_labels_name_the_modes_of_masks(segment, tmp_path, capsys):
    assert segment(mode="finetune") == 2
    assert "finetune.mode=segment" in one_line(capsys)
    assert not (tmp_path / "run").exists()
