"""MAE: what the loss sees, and what its numbers mean."""

import math

import pytest
import torch
from helpers.objectives import batch_of, build

from mae_vit.models.attention import set_fused_attention
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.masking import patch_noise
from mae_vit.models.patches import patchify
from mae_vit.objectives.mae import MAE
from mae_vit.objectives.reconstruction import local_average
from mae_vit.training.engines.cost import MetaStep


@pytest.mark.parametrize(
    ("norm_pix_loss", "fused", "decoder_depth"), [(True, True, 1), (True, False, 3), (False, False, 1)]
)
def test_training_computes_the_loss_of_the_whole_reconstruction(norm_pix_loss, fused, decoder_depth):
    """Predicting masked patches alone gives the same loss and the same gradients."""
    objective = build("mae", "tiny", norm_pix_loss=norm_pix_loss, decoder_depth=decoder_depth)
    set_fused_attention(objective, fused)
    batch = batch_of(objective)
    losses, gradients = [], []
    for whole in (True, False):
        if whole:
            images = objective.normalize(batch.images)
            masking = objective.draw_masking(batch.keys)
            prediction = objective.predict_all(images, masking)
            loss = objective.squared_error(images, prediction)[masking.mask.bool()].mean()
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


@pytest.mark.parametrize(
    ("encoder", "decode_ratio", "count"), [("tiny", 0.3, 4), ("tiny", 0.99, 12), ("class tokens", 0.05, 1)]
)
def test_partial_decoding_is_the_whole_decoder_blind_to_what_is_left_out(encoder, decode_ratio, count):
    """Image by image, in the order of patches, keys hidden by an attention mask, in float64."""
    objective = build("mae", encoder, decode_ratio=decode_ratio, decoder_depth=2)
    batch, k = batch_of(objective), objective.encoder.num_class_tokens
    loss = objective(batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in objective.named_parameters() if p.requires_grad}

    objective.double().zero_grad()
    images = (batch.images.double() / 255 - 0.4) / 0.2
    errors = []
    for image, ranks in zip(images, patch_noise(batch.keys, 16).tolist(), strict=True):
        by_rank = sorted(range(16), key=ranks.__getitem__)
        visible, predicted = by_rank[:4], by_rank[4 : 4 + count]
        encoded = objective.encoder.forward_visible(image[None], torch.tensor([visible]))
        inner = objective.decoder_embed(encoded)[0]
        shown = dict(zip(visible, inner[k:], strict=True))
        rows = [shown.get(patch, objective.mask_token[0, 0]) for patch in range(16)]
        tokens = torch.stack([*inner[:k], *rows])[None]
        tokens = tokens + objective.decoder_pos_embed
        seen = torch.zeros(k + 16, dtype=torch.bool)
        seen[[*range(k), *(k + patch for patch in visible + predicted)]] = True
        for block in objective.decoder_blocks:
            tokens = block(tokens, attn_mask=seen.expand(1, 1, k + 16, k + 16))
        prediction = objective.decoder_pred(objective.decoder_norm(tokens))[0, k:]
        pixels = patchify(image[None], 4)[0]
        for patch in predicted:
            target = (pixels[patch] - pixels[patch].mean()) / (pixels[patch].var() + 1e-6).sqrt()
            errors.append((prediction[patch] - target).square().mean())
    assert len(errors) == 8 * count
    expected = torch.stack(errors).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for name, gradient in gradients.items():
        parameter = dict(objective.named_parameters())[name]
        torch.testing.assert_close(gradient, parameter.grad.float(), atol=1e-6, rtol=1e-4)


def test_partial_decoding_measures_and_shows_all_masked_patches():
    whole, half = (build("mae", "tiny", decode_ratio=ratio) for ratio in (1.0, 0.5))
    batch = batch_of(whole)
    with torch.no_grad():
        for name, value in whole.evaluation_sums(batch).items():
            assert torch.equal(half.evaluation_sums(batch)[name], value), name
        for row, same in zip(whole.pictures(batch), half.pictures(batch), strict=True):
            assert torch.equal(row.images, same.images), row.label


def test_partial_decoding_saves_what_it_should():
    """A decoder as wide as the encoder, so that shares of tokens are shares of FLOPs."""

    def flops(**changes) -> float:
        def objective() -> MAE:
            return build("mae", "tiny", decoder_depth=8, **changes)

        return MetaStep(objective, (3, 16, 16), 2).estimate().flops_per_image

    # 1 + 4 visible + 6 of 12 masked tokens rather than 17, in all of 8 blocks but a part of the last.
    assert 0.55 < flops(decode_ratio=0.5) / flops() < 0.75


def test_a_patch_far_from_all_visible_ones_has_the_nearest_color():
    encoder = ViTEncoder(img_size=(80, 80), patch_size=4, embed_dim=32, depth=1, num_heads=2)
    images = torch.zeros(1, 3, 80, 80)
    images[:, :, :4, :4] = 1.0
    mask = torch.ones(1, 400)
    mask[0, 0] = mask[0, 1] = 0
    average = local_average(images, mask, encoder)
    assert torch.isfinite(average).all()
    # 19 rows down and 19 columns on: exp(-361) is 0 in float32, the ratio of two such is not.
    expected = math.exp(-(19**2) / 2 + 18**2 / 2) / (1 + math.exp(-(19**2) / 2 + 18**2 / 2))
    torch.testing.assert_close(average[0, 399], torch.full((48,), expected), rtol=1e-3, atol=0)
