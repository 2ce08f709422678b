"""MAE: what the loss sees, and what its numbers mean."""

import math

import pytest
import torch
from test_contract import batch_of, build

from mae_vit.encoder import ViTEncoder, set_fused_attention
from mae_vit.masking import patch_ranks
from mae_vit.objectives.reconstruction import local_average
from mae_vit.patches import patchify


def test_loss_ignores_targets_of_visible_patches():
    objective = build("mae", "tiny", norm_pix_loss=False)
    images = torch.randn(2, 3, 16, 16)
    prediction, mask = objective.reconstruct(images, patch_ranks(batch_of(objective, 0, 2).keys, 16))
    hidden = mask.reshape(2, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    loss = objective.loss(images, prediction, mask)
    assert torch.equal(objective.loss(images + 5 * (1 - hidden), prediction, mask), loss)
    assert objective.loss(images + 5 * hidden, prediction, mask) != loss


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoder_depth", [1, 3])
def test_training_computes_the_loss_of_the_whole_reconstruction(norm_pix_loss, fused, decoder_depth):
    """Predicting masked patches alone gives the same loss and the same gradients."""
    objective = build("mae", "tiny", norm_pix_loss=norm_pix_loss, decoder_depth=decoder_depth)
    set_fused_attention(objective, fused)
    batch = batch_of(objective)
    losses, gradients = [], []
    for whole in (True, False):
        if whole:
            images = objective.normalize(batch.images)
            prediction, mask = objective.reconstruct(images, patch_ranks(batch.keys, 16))
            loss = objective.loss(images, prediction, mask)
        else:
            loss = objective(batch).loss
        objective.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            {name: p.grad.clone() for name, p in objective.named_parameters() if p.requires_grad}
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_loss_by_hand():
    objective = build("mae", "tiny", norm_pix_loss=True)
    images = torch.randn(2, 3, 16, 16)
    prediction, mask = torch.randn(2, 16, 48), torch.zeros(2, 16)
    mask[0, 3] = mask[1, 7] = 1
    expected = 0.0
    for sample, patch in ((0, 3), (1, 7)):
        pixels = patchify(images, 4)[sample, patch].double()
        target = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
        expected += (prediction[sample, patch] - target).square().mean().item() / 2
    assert objective.loss(images, prediction, mask).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_psnr_and_its_baseline(norm_pix_loss):
    """PSNR against a plain computation on 0..1 pixels."""
    objective = build("mae", "tiny", norm_pix_loss=norm_pix_loss).eval()
    batch = batch_of(objective)
    with torch.no_grad():
        sums = objective.evaluation_sums(batch)
        images = objective.normalize(batch.images)
        prediction, mask = objective.reconstruct(images, patch_ranks(batch.keys, 16))
    pixels = patchify(batch.images.double() / 255, 4)
    if norm_pix_loss:
        # Statistics in 0..1 pixels: channels share mean 0.4 and std 0.2 here, so scaling commutes.
        mean, std = pixels.mean(-1, keepdim=True), (pixels.var(-1, keepdim=True) + 1e-6 * 0.04).sqrt()
        shown, baseline = prediction * std + mean, mean.expand_as(pixels)
        expected = -10 * math.log10((baseline - pixels)[mask == 1].square().mean().item())
    else:
        shown = prediction * 0.2 + 0.4
        expected = None
    metrics = objective.evaluation_metrics({name: float(value) for name, value in sums.items()})
    mse = (shown - pixels)[mask == 1].square().mean().item()
    assert metrics["psnr_db"] == pytest.approx(-10 * math.log10(mse), abs=1e-3)
    if expected is not None:
        assert metrics["psnr_baseline_db"] == pytest.approx(expected, abs=1e-3)
    assert metrics["psnr_gain_db"] == pytest.approx(metrics["psnr_db"] - metrics["psnr_baseline_db"])


def test_raw_baseline_is_a_local_average_of_visible_colors():
    objective = build("mae", "tiny", norm_pix_loss=False)
    images = torch.zeros(1, 3, 16, 16)
    images[:, :, :, :4] = 1.0  # the first column of patches
    mask = torch.ones(1, 16)
    mask[0, 4] = mask[0, 7] = 0  # row 1, columns 0 and 3 are visible
    found = local_average(images, mask, objective.encoder)[0, 5]  # row 1, column 1
    expected = math.exp(-0.5) / (math.exp(-0.5) + math.exp(-2))
    torch.testing.assert_close(found, torch.full_like(found, expected))


def test_a_patch_far_from_all_visible_ones_has_the_nearest_color():
    encoder = ViTEncoder(img_size=(80, 80), patch_size=4, embed_dim=32, depth=1, num_heads=2)
    images = torch.zeros(1, 3, 80, 80)
    images[:, :, :4, :4] = 1.0
    mask = torch.ones(1, 400)
    mask[0, 0] = mask[0, 1] = 0
    found = local_average(images, mask, encoder)
    assert torch.isfinite(found).all()
    # 19 rows down and 19 columns on: exp(-361) is 0 in float32, the ratio of two such is not.
    expected = math.exp(-(19**2) / 2 + 18**2 / 2) / (1 + math.exp(-(19**2) / 2 + 18**2 / 2))
    torch.testing.assert_close(found[0, 399], torch.full((48,), expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_ratio": 0.5},
        {"decoder_depth": 2},
        {"decoder_embed_dim": 64},
        {"decoder_num_heads": 4},
        {"norm_pix_loss": False},
    ],
)
def test_every_option_has_an_effect(changes):
    first, second = build("mae", "tiny"), build("mae", "tiny", **changes)
    assert first(batch_of(first)).loss != second(batch_of(second)).loss
