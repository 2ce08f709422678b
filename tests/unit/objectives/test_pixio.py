"""Blocks of masked patches and several class tokens (Pixio), against plain loops that share no code with ours."""

import math

import pytest
import torch
from helpers.objectives import batch_of, build

from mae_vit.core.keyed_rng import RngStream, SampleKeys
from mae_vit.models.encoders.base import pooled
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.masking import patch_noise, random_masking, unit_masking
from mae_vit.objectives import OBJECTIVES

KEYS = SampleKeys(5, 2, torch.arange(40))


def masked_by_loops(keys: SampleKeys, rows: int, columns: int, ratio: float, unit: int) -> list[set[int]]:
    """The masked patches of each image: the units of the highest words, whole."""
    units = [(row, column) for row in range(rows // unit) for column in range(columns // unit)]
    words = keys.random_uint32(RngStream.MASK, len(units)).tolist()
    keep = int(len(units) * (1 - ratio))
    masked = []
    for drawn in words:
        order = sorted(range(len(units)), key=lambda number: (drawn[number], number))
        masked.append(
            {
                (units[number][0] * unit + down) * columns + units[number][1] * unit + across
                for number in order[keep:]
                for down in range(unit)
                for across in range(unit)
            }
        )
    return masked


@pytest.mark.parametrize(("rows", "columns", "unit"), [(8, 8, 1), (8, 8, 2), (8, 12, 4), (4, 6, 2)])
@pytest.mark.parametrize("ratio", [0.75, 0.5])
def test_masks_are_those_of_plain_loops(rows, columns, unit, ratio):
    masking = unit_masking(KEYS, (rows, columns), ratio, unit)
    expected = masked_by_loops(KEYS, rows, columns, ratio, unit)
    assert len(set(map(frozenset, expected))) > 3
    for image, patches in enumerate(expected):
        assert set(masking.mask[image].nonzero().flatten().tolist()) == patches
        assert set(masking.ids_masked[image].tolist()) == patches
        assert set(masking.ids_keep[image].tolist()) == set(range(rows * columns)) - patches
        shuffled = masking.ids_keep[image].tolist() + masking.ids_masked[image].tolist()
        assert [shuffled[place] for place in masking.ids_restore[image].tolist()] == list(
            range(rows * columns)
        )


@pytest.mark.parametrize(("decode_ratio", "units"), [(0.5, 2), (0.4, 1), (0.9, 3)])
def test_a_share_decodes_whole_units(monkeypatch, decode_ratio, units):
    objective = build("mae", "class tokens", mask_unit=2, mask_ratio=0.75, decode_ratio=decode_ratio)
    decoded, decode = [], objective.decode_subset

    def decode_subset(encoded, ids_keep, ids):
        decoded.append(ids)
        return decode(encoded, ids_keep, ids)

    monkeypatch.setattr(objective, "decode_subset", decode_subset)
    objective(batch_of(objective, 0, 2))
    side = objective.encoder.grid_size[1]
    for patches in decoded[0].tolist():
        corners = {(patch // side // 2, patch % side // 2) for patch in patches}
        assert len(patches) == 4 * len(corners) == 4 * units


def test_a_unit_of_one_is_maes_masking_to_the_bit():
    ours, mae = unit_masking(KEYS, (6, 6), 0.75), random_masking(patch_noise(KEYS, 36), 0.75)
    assert all(torch.equal(getattr(ours, name), value) for name, value in vars(mae).items())


def attend(tokens: list[torch.Tensor], layer: torch.nn.Module) -> list[torch.Tensor]:
    """Multi-head attention, token by token."""
    width, heads = tokens[0].numel(), layer.num_heads
    size = width // heads
    qkv = [layer.qkv.weight @ token + layer.qkv.bias for token in tokens]
    mixed = []
    for query in qkv:
        parts = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            scores = [
                float(query[:width][at] @ other[width : 2 * width][at]) / math.sqrt(size) for other in qkv
            ]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            values = [
                weight / sum(weights) * other[2 * width :][at]
                for weight, other in zip(weights, qkv, strict=True)
            ]
            parts.append(sum(values))
        mixed.append(layer.proj.weight @ torch.cat(parts) + layer.proj.bias)
    return mixed


def norm(token: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    centered = token - token.mean()
    return centered / (centered.square().mean() + 1e-6).sqrt() * layer.weight + layer.bias


def run_blocks(tokens: list[torch.Tensor], blocks) -> list[torch.Tensor]:
    for block in blocks:
        mixed = attend([norm(token, block.norm1) for token in tokens], block.attn)
        tokens = [token + more for token, more in zip(tokens, mixed, strict=True)]
        for place, token in enumerate(tokens):
            hidden = block.mlp.fc1.weight @ norm(token, block.norm2) + block.mlp.fc1.bias
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
            tokens[place] = token + block.mlp.fc2.weight @ hidden + block.mlp.fc2.bias
    return tokens


def patch_pixels(image: torch.Tensor, patch: int, columns: int) -> torch.Tensor:
    """(C, 4, 4) of a patch of 4 px."""
    top, left = patch // columns * 4, patch % columns * 4
    return image[:, top : top + 4, left : left + 4]


def loss_by_loops(objective, batch) -> torch.Tensor:
    """Pixio's loss: visible patches and class tokens in, all tokens through the decoder, masked patches out."""
    encoder, (rows, columns) = objective.encoder, objective.encoder.grid_size
    classes = [encoder.cls_token[0, 0], *encoder.reg_token[0]]
    count, errors = len(classes), []
    masks = masked_by_loops(batch.keys, rows, columns, objective.mask_ratio, objective.mask_unit)
    for image, masked in zip(batch.images, masks, strict=True):
        pixels = (image.double() / 255 - objective.mean) / objective.std
        visible = [patch for patch in range(rows * columns) if patch not in masked]
        weight, bias = encoder.patch_embed.proj.weight, encoder.patch_embed.proj.bias
        tokens = [token + encoder.pos_embed[0, place] for place, token in enumerate(classes)]
        for patch in visible:
            flat = weight.flatten(1) @ patch_pixels(pixels, patch, columns).flatten() + bias
            tokens.append(flat + encoder.pos_embed[0, count + patch])
        encoded = [norm(token, encoder.norm) for token in run_blocks(tokens, encoder.blocks)]
        inner = [objective.decoder_embed.weight @ token + objective.decoder_embed.bias for token in encoded]
        shown = dict(zip(visible, inner[count:], strict=True))
        tokens = [
            *inner[:count],
            *(shown.get(patch, objective.mask_token[0, 0]) for patch in range(rows * columns)),
        ]
        tokens = [token + objective.decoder_pos_embed[0, place] for place, token in enumerate(tokens)]
        tokens = run_blocks(tokens, objective.decoder_blocks)
        for patch in sorted(masked):
            out = norm(tokens[count + patch], objective.decoder_norm)
            predicted = objective.decoder_pred.weight @ out + objective.decoder_pred.bias
            target = patch_pixels(pixels, patch, columns).permute(1, 2, 0).flatten()
            target = (target - target.mean()) / (target.var() + 1e-6).sqrt()
            errors.append((predicted - target).square().mean())
    return torch.stack(errors).mean()


def test_the_loss_is_that_of_plain_loops():
    objective = build("mae", "class tokens", mask_unit=2, mask_ratio=0.5, decoder_depth=2).double()
    objective.decoder_pos_embed.data[0, :3] = 0  # class tokens have no place
    batch = batch_of(objective, 0, 2)
    with torch.no_grad():
        assert objective(batch).loss.item() == pytest.approx(loss_by_loops(objective, batch).item(), rel=1e-5)


def test_decoding_a_part_equals_hiding_the_rest_with_several_class_tokens():
    """All masked patches by either path of the decoder: the same predictions."""
    objective = build("mae", "class tokens", mask_unit=2, mask_ratio=0.5, decoder_depth=2)
    batch = batch_of(objective)
    masking = objective.draw_masking(batch.keys)
    encoded = objective.encoder.forward_visible(objective.normalize(batch.images), masking.ids_keep)
    whole = objective.decode(encoded, masking.ids_restore, masking.ids_masked)
    part = objective.decode_subset(encoded, masking.ids_keep, masking.ids_masked)
    torch.testing.assert_close(part, whole, atol=1e-5, rtol=1e-5)


def test_the_read_out_is_the_mean_of_the_class_tokens_and_each_of_them_matters():
    torch.manual_seed(0)
    encoder = ViTEncoder(
        img_size=(8, 8), patch_size=4, embed_dim=16, depth=2, num_heads=2, class_tokens=3
    ).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        tokens = encoder.forward_features(images)
        assert tokens.shape == (2, 3 + 4, 16)
        torch.testing.assert_close(encoder.forward_replaced(encoder.embed_patches(images)), tokens)
        expected = (tokens[:, 0] + tokens[:, 1] + tokens[:, 2]) / 3
        torch.testing.assert_close(pooled(tokens, "cls", 3), expected)
        torch.testing.assert_close(pooled(tokens, "mean", 3), tokens[:, 3:].mean(dim=1))
        for place in range(2):
            encoder.reg_token[0, place] += 1
            assert not torch.allclose(pooled(encoder.forward_features(images), "cls", 3), expected)
            encoder.reg_token[0, place] -= 1


def test_units_that_do_not_fit_are_refused():
    section = OBJECTIVES["mae"].model_validate({"name": "mae", "mask_unit": 4})
    geometry = {"patch_size": 4, "in_chans": 3, "num_classes": 0}
    section.check(grid_size=(16, 16), **geometry)
    with pytest.raises(ValueError, match=r"^mask_unit=4 does not divide the 14 x 14 patches of an image$"):
        section.check(grid_size=(14, 14), **geometry)
    with pytest.raises(ValueError, match=r"^mask_ratio=0.75 leaves none of 1 mask units visible"):
        section.check(grid_size=(4, 4), **geometry)
