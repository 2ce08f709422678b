"""Blocks of masked patches and several class tokens (Pixio), against plain loops that share no code with ours."""

import pytest
import torch
from helpers.objectives import batch_of, build

from mae_vit.core.keyed_rng import RngStream, SampleKeys
from mae_vit.models.encoders.base import pool_tokens
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.masking import unit_masking

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


@pytest.mark.parametrize(("rows", "columns", "unit"), [(8, 8, 1), (8, 12, 4), (4, 6, 2)])
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
        torch.testing.assert_close(pool_tokens(encoder, tokens, "cls"), expected)
        torch.testing.assert_close(pool_tokens(encoder, tokens, "mean"), tokens[:, 3:].mean(dim=1))
        for place in range(2):
            encoder.reg_token[0, place] += 1
            assert not torch.allclose(pool_tokens(encoder, encoder.forward_features(images), "cls"), expected)
            encoder.reg_token[0, place] -= 1
