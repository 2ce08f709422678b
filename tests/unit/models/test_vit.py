"""The encoder is timm's VisionTransformer: counts, names, features; and MAE's fixed positions."""

import math

import pytest
import timm
import torch
from helpers.encoders import info_of
from safetensors.torch import load_file

from mae_vit.models.encoder_file import encoder_bytes
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.sizes import SIZES
from mae_vit.objectives.config import MAEConfig
from mae_vit.weights.encoder import load_encoder

# Parameters at 224 px with num_classes=0.
COUNTS = {
    ("Ti", 16): 5_524_416,
    ("S", 16): 21_665_664,
    ("B", 32): 87_455_232,
    ("L", 16): 303_301_632,
    ("H", 14): 630_764_800,
}


def build(name: str, img_size: tuple[int, int], patch_size: int, **options) -> ViTEncoder:
    return ViTEncoder(img_size=img_size, patch_size=patch_size, **vars(SIZES[name]), **options)


@pytest.mark.parametrize(("name", "patch_size"), COUNTS)
def test_parameter_counts(name, patch_size):
    with torch.device("meta"):
        encoder = build(name, (224, 224), patch_size)
    assert sum(p.numel() for p in encoder.parameters()) == COUNTS[name, patch_size]


@pytest.mark.parametrize(
    ("img_size", "patch_size", "in_chans", "pos_embed"),
    [((32, 32), 4, 3, "learnable"), ((24, 40), 8, 1, "sincos")],
)
def test_saved_encoder_loads_strictly_into_timm_with_the_same_features(
    tmp_path, img_size, patch_size, in_chans, pos_embed
):
    torch.manual_seed(1)
    encoder = build("tiny-cifar", img_size, patch_size, in_chans=in_chans, pos_embed=pos_embed).eval()
    facts = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans, "pos_embed": pos_embed}
    info = info_of(embed_dim=128, depth=6, **facts)
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(encoder_bytes(encoder, info))
    del facts["pos_embed"]
    sizes = {"embed_dim": 128, "depth": 6, "num_heads": 4, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **facts, **sizes).eval()
    model.load_state_dict(load_file(path), strict=True)
    images = torch.randn(2, in_chans, *img_size)
    again = load_encoder(path)
    read = again.info
    with torch.no_grad():
        expected = encoder.forward_features(images)
        torch.testing.assert_close(model.forward_features(images), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(again.encoder.forward_features(images), expected, atol=0, rtol=0)
        torch.testing.assert_close(again(images), expected[:, 1:].mean(dim=1), atol=1e-5, rtol=0)
        by_cls = load_encoder(path, pool="cls")(images)
        torch.testing.assert_close(by_cls, expected[:, 0], atol=1e-5, rtol=0)
    assert expected.std() > 0.1
    assert (read.step, read.img_size, read.vit.pos_embed) == (7, img_size, pos_embed)


def position_table(grid: int, width: int) -> torch.Tensor:
    """The fixed table, value by value: column in the first half, row in the second, [CLS] zero."""
    table = torch.zeros(1, 1 + grid * grid, width)
    quarter = width // 4
    for row in range(grid):
        for column in range(grid):
            for half, place in enumerate((column, row)):
                for i in range(quarter):
                    angle = place / 10000 ** (i / quarter)
                    at = half * 2 * quarter + i
                    table[0, 1 + row * grid + column, at] = math.sin(angle)
                    table[0, 1 + row * grid + column, at + quarter] = math.cos(angle)
    return table


def test_position_tables():
    """Ours against the formula written out, value by value."""
    encoder = info_of(img_size=(32, 32), embed_dim=64).geometry.build()
    mae = MAEConfig(name="mae", decoder_embed_dim=48).build(encoder, mean=[0.5] * 3, std=[0.25] * 3)
    for table, width in ((encoder.pos_embed, 64), (mae.decoder_pos_embed, 48)):
        torch.testing.assert_close(table.data, position_table(8, width), atol=1e-6, rtol=0)
        assert not table.requires_grad
