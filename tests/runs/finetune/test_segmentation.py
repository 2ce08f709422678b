"""Segmentation: the probe against scikit-learn and a plain loop, its split of a batch, and whole runs."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.commands import ROOT, lines_of, one_line
from helpers.finetune import SMALL, TINY
from helpers.images import FIRST, STEP
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import jaccard_score, log_loss

from mae_vit.cli.main import main as command_line
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.config.network import NetworkSection
from mae_vit.finetuning.job import main
from mae_vit.finetuning.segmentation.build import load_weights_into_segmenter
from mae_vit.finetuning.segmentation.networks import build_map_network, map_width
from mae_vit.finetuning.segmentation.segmenter import ViTSegmenter
from mae_vit.models.vit import ViTEncoder
from mae_vit.weights.encoder import load_encoder
from mae_vit.weights.start import Weights


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


def segmenter(*, probe: bool, patch_size: int = 2, classes: int = 3) -> ViTSegmenter:
    torch.manual_seed(0)
    encoder = ViTEncoder(
        img_size=(8, 8),
        patch_size=patch_size,
        in_chans=1,
        embed_dim=16,
        depth=2,
        num_heads=2,
        drop_path_rate=0.2,
    )
    return ViTSegmenter(encoder, num_classes=classes, probe=probe, label_smoothing=0.0, mean=[0.5], std=[0.2])


def test_a_frozen_projection_stays_frozen_whatever_else_is_loaded_and_thawed():
    encoder = segmenter(probe=False).encoder
    options = {"num_classes": 3, "probe": False, "label_smoothing": 0.0, "mean": [0.5], "std": [0.2]}
    model = ViTSegmenter(encoder, freeze_patch_embed=True, **options)
    for frozen in (False, True, False):
        model.freeze(frozen)
        trained = {name for name, each in model.encoder.named_parameters() if each.requires_grad}
        assert not any(name.startswith("patch_embed.") for name in trained)
        assert bool(trained) == (not frozen)
    assert any(
        each.requires_grad for each in ViTSegmenter(encoder, **options).encoder.patch_embed.parameters()
    )


def batch_of(images: torch.Tensor, truth: torch.Tensor) -> Batch:
    index = torch.arange(len(images))
    return Batch(
        images, torch.full((len(images),), -1), SampleKeys(0, 0, index), (), (truth + 1).byte()[:, None]
    )


def random_batch(count: int, classes: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    noise = torch.randint(0, classes, (count, 8, 8), generator=generator)
    # Half of the pixels tell their class by their gray value: neither random nor separable.
    truth = torch.where(
        torch.rand(noise.shape, generator=generator) < 0.5, images[:, 0].long() * classes // 256, noise
    )
    truth[torch.rand(noise.shape, generator=generator) < 0.2] = -1
    return batch_of(images, truth)


@pytest.mark.slow
def test_the_probe_is_scikit_learns_logistic_regression():
    """With one pixel a token, nothing is between the linear layer and the pixels."""
    model, batch = segmenter(probe=True, patch_size=1), random_batch(40)
    model.decode_head.norm.eps = 1e-12
    optimizer = torch.optim.LBFGS(model.decode_head.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        scores = model.logits(batch.images)
        # Over pixels, as scikit-learn's; the run's loss gives each image the same weight.
        loss = F.cross_entropy(scores, batch.class_map(), ignore_index=-1)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        features = (
            model.encoder.forward_features(model.normalize(batch.images))[:, 1:]
            .reshape(-1, 16)
            .double()
            .numpy()
        )
        chances = (
            model.logits(batch.images).softmax(dim=1).permute(0, 2, 3, 1).reshape(-1, 3).double().numpy()
        )
    labels = batch.class_map().flatten().numpy()
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    counted = labels >= 0
    other = LogisticRegression(C=np.inf, tol=1e-8, max_iter=5000).fit(features[counted], labels[counted])
    expected = other.predict_proba(features)
    assert np.abs(chances - expected).max() < 5e-3
    ours, theirs = (log_loss(labels[counted], one[counted]) for one in (chances, expected))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert theirs < 1.0  # it has learned something: 1.10 is a guess


def test_the_loss_is_that_of_a_plain_loop():
    model, batch = segmenter(probe=False), random_batch(5)
    truth = batch.class_map()
    truth[2] = -1  # an image in which nothing counts
    batch = batch_of(batch.images, truth)
    model.eval()
    output = model(batch)
    chances = model.logits(batch.images).softmax(dim=1).detach()
    means, hits, counted = [], 0, 0
    for number in range(5):
        losses = []
        for row in range(8):
            for column in range(8):
                k = int(truth[number, row, column])
                if k >= 0:
                    losses.append(-float(chances[number, k, row, column].log()))
                    hits += int(chances[number, :, row, column].argmax()) == k
                    counted += 1
        means.append(sum(losses) / max(len(losses), 1))
    assert float(output.loss) == pytest.approx(sum(means) / 5, rel=1e-5)
    assert [int(one) for one in output.values["pixel_accuracy"]] == [hits, counted]
    parts = [
        model(batch_of(batch.images[cut], truth[cut])).loss * (cut.stop - cut.start)
        for cut in (slice(0, 2), slice(2, 5))
    ]
    assert float(sum(parts) / 5) == pytest.approx(float(output.loss), rel=1e-6)


def test_held_out_metrics_are_scikit_learns():
    model, batch = segmenter(probe=False).eval(), random_batch(6)
    with torch.no_grad():
        sums: dict[str, float] = {}
        for cut in (slice(0, 4), slice(4, 6)):
            part = batch_of(batch.images[cut], batch.class_map()[cut])
            for name, value in model.evaluation_sums(part).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        metrics = model.evaluation_metrics(sums)
        guess = model.logits(batch.images).argmax(dim=1)
    counted = batch.class_map() >= 0
    truth, guess = batch.class_map()[counted].numpy(), guess[counted].numpy()
    assert metrics["miou"] == pytest.approx(jaccard_score(truth, guess, average="macro"))
    assert metrics["pixel_accuracy"] == pytest.approx((truth == guess).mean())


def test_a_norm_behind_the_mean_norms_each_token():
    """Of a start that was fine-tuned as a classifier that pools the mean."""
    trained = ViTEncoder(img_size=(8, 8), patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    tensors = {name: value + 1 for name, value in trained.state_dict().items()}
    renamed = {f"fc_{name}" if name.startswith("norm.") else name: each for name, each in tensors.items()}
    model = segmenter(probe=True)
    load_weights_into_segmenter(model, Weights("start", renamed))
    assert torch.equal(model.encoder.norm.weight, tensors["norm.weight"])


def test_a_probe_trains_its_head_alone():
    model, batch = segmenter(probe=True), random_batch(4)
    model.train()
    before = model.decode_head.norm.running_mean.clone()
    model(batch).loss.backward()
    trained = {name for name, one in model.named_parameters() if one.grad is not None}
    assert trained == {"decode_head.classifier.weight", "decode_head.classifier.bias"}
    assert not model.encoder.training
    assert model.decode_head.training
    assert not torch.equal(before, model.decode_head.norm.running_mean)
    whole = segmenter(probe=False)
    whole.train()
    whole(batch).loss.backward()
    assert all(one.grad is not None for one in whole.parameters())


@pytest.mark.parametrize(
    ("name", "width", "rows"),
    [
        ("SimpleCNN", 128, 8),
        ("SmallResNet", 64, 8),
        ("SmallBiT", 128, 8),
        ("SmallHybrid", 128, 8),
        ("timm:resnet10t", 512, 1),
    ],
)
def test_networks_have_feature_maps(name, width, rows):
    section = NetworkSection(name=name, img_size=32, in_chans=3)
    network = build_map_network(section)
    assert map_width(network, section) == width
    features = network(torch.rand(2, 3, 32, 32))
    assert features.shape == (2, width, rows, rows)
    features.square().mean().backward()
    assert [n for n, one in network.named_parameters() if one.grad is None and one.requires_grad] == []


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
