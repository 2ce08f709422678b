"""Training learns: in seconds, each objective beats on held-out digits what needs no training."""

from collections.abc import Sequence

import pytest
from helpers.commands import ROOT, lines_of

from mae_vit.pretraining.command import main

SMALL = [
    *("model.img_size=8", "model.patch_size=2", "model.in_chans=1"),
    *("train.epochs=null", "train.warmup_epochs=null", "train.steps=150", "train.warmup_steps=15"),
    *("train.engine=torch", "train.effective_batch_size=128", "train.precision=fp32", "optim.lr=3e-3"),
    *("data.augment.crop=none", "data.augment.flip=false"),
    *("monitor.evaluate_every_steps=150", "monitor.tensorboard=false", "checkpoint.every_steps=150"),
]
VIT = ["model.embed_dim=48", "model.depth=2", "model.num_heads=4"]
# Accuracy of naming the darkest color for every patch of the held-out digits, far above that of a visible neighbor.
MOST_FREQUENT = 0.415
DECODER = ["decoder_embed_dim=48", "decoder_depth=1", "decoder_num_heads=4"]


@pytest.fixture
def heldout(digits, tmp_path):
    """Trains, and returns the metrics of the held-out digits: heldout("config", "key=value", ...)."""

    def train(config: str, *options: str, size: Sequence[str] = VIT) -> dict:
        words = ["--config", str(ROOT / "configs" / f"{config}.yaml"), *SMALL, *size, *options]
        assert main([*words, f"data.path={digits}", f"run.dir={tmp_path / 'run'}"]) == 0
        return lines_of(tmp_path / "run")[-1]["heldout"]

    return train


def test_mae_beats_the_statistics_of_true_patches(heldout):
    metrics = heldout("mae_digits", *(f"objective.{option}" for option in DECODER))
    assert metrics["psnr_gain_db"] > 0.6


def test_simmim_beats_the_mean_of_the_visible_pixels(heldout):
    assert heldout("mae_digits", "objective={name: simmim}")["psnr_gain_db"] > 2


def test_masked_patch_prediction_beats_the_most_frequent_color(heldout):
    assert heldout("masked_patch_digits")["accuracy_on_mask"] > MOST_FREQUENT + 0.03


def test_a_supervised_encoder_knows_digits(heldout):
    assert heldout("supervised_cifar_tiny")["accuracy"] > 0.75


def test_mae_with_a_contrast_reconstructs_and_recognizes(heldout):
    config = "contrastive_mae_scratch_cifar_tiny"
    metrics = heldout(config, *(f"objective.{option}" for option in DECODER))
    assert metrics["psnr_gain_db"] > 0.6
    # The other view of an image among some hundred; without training its features are nearly alike.
    assert metrics["retrieval_top1"] > 0.08
    assert metrics["negative_cosine"] < 0.5 * metrics["positive_cosine"]
    assert metrics["z_std"] > 0.5


def test_the_contrast_alone_tells_images_apart(heldout):
    crops = ["data.augment.crop=random_resized", "objective.group_size=64"]
    metrics = heldout("contrastive_small_resnet_cifar", *crops, size=[])
    # Among 127 other views chance is 4.84.
    assert metrics["loss"] < 4.2
    assert metrics["negative_cosine"] < 0.5 * metrics["positive_cosine"]
    assert metrics["z_std"] > 0.5
