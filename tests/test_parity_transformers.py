"""Our MAE against transformers' ViTMAEForPreTraining: same weights, same masks, same numbers."""

import math

import pytest
import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.masking import patch_noise
from mae_vit.models.vit import ViTEncoder
from mae_vit.objectives.mae import MAE, MAEConfig


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


def theirs(img_size: int, patch_size: int, norm_pix_loss: bool) -> ViTMAEForPreTraining:
    config = ViTMAEConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        decoder_hidden_size=48,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=192,
        image_size=img_size,
        patch_size=patch_size,
        norm_pix_loss=norm_pix_loss,
        # The official code's; transformers' default is 1e-12.
        layer_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    model = ViTMAEForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Biases and norms too: zeros and ones would hide a missing term.
                parameter.add_(0.02 * torch.randn_like(parameter))
        # transformers leaves its tables zero when a model is built from a config alone.
        grid = img_size // patch_size
        model.vit.embeddings.position_embeddings.copy_(position_table(grid, 64))
        model.decoder.decoder_pos_embed.copy_(position_table(grid, 48))
    return model


def ours(img_size: int, patch_size: int, norm_pix_loss: bool) -> MAE:
    encoder = ViTEncoder(
        img_size=(img_size, img_size),
        patch_size=patch_size,
        embed_dim=64,
        depth=3,
        num_heads=4,
        pos_embed="sincos",
    )
    config = MAEConfig(
        name="mae", decoder_embed_dim=48, decoder_depth=2, decoder_num_heads=4, norm_pix_loss=norm_pix_loss
    )
    return config.build(encoder, mean=[0.5] * 3, std=[0.25] * 3).eval()


def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' names to ours; q, k, v are stacked."""
    ours = {}
    for name, value in state.items():
        if ".query." in name or ".q_proj." in name:
            key = name.replace("query", "key").replace("q_proj", "k_proj")
            val = name.replace("query", "value").replace("q_proj", "v_proj")
            value = torch.cat([value, state[key], state[val]])
        elif any(word in name for word in (".key.", ".value.", ".k_proj.", ".v_proj.")):
            continue
        ours[rename(name)] = value
    return ours


def rename(name: str) -> str:
    for old, new in (
        ("vit.embeddings.cls_token", "encoder.cls_token"),
        ("vit.embeddings.position_embeddings", "encoder.pos_embed"),
        ("vit.embeddings.patch_embeddings.projection", "encoder.patch_embed.proj"),
        ("vit.encoder.layer", "encoder.blocks"),
        ("vit.layers", "encoder.blocks"),
        ("vit.layernorm", "encoder.norm"),
        ("decoder.decoder_layers", "decoder_blocks"),
        ("decoder.layers", "decoder_blocks"),
        ("decoder.decoder_", "decoder_"),
        ("decoder.mask_token", "mask_token"),
        ("attention.attention.query", "attn.qkv"),
        ("attention.attention.q_proj", "attn.qkv"),
        ("attention.q_proj", "attn.qkv"),
        ("attention.o_proj", "attn.proj"),
        ("attention.output.dense", "attn.proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
    ):
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize(("img_size", "patch_size"), [(224, 16), (32, 4)])
def test_same_loss_and_predictions(img_size: int, patch_size: int, norm_pix_loss: bool) -> None:
    reference, model = theirs(img_size, patch_size, norm_pix_loss), ours(img_size, patch_size, norm_pix_loss)
    model.load_state_dict(convert(reference.state_dict()), strict=True)
    images = torch.randn(4, 3, img_size, img_size)
    ranks = patch_noise(SampleKeys(0, 0, torch.arange(4)), model.encoder.num_patches)
    # Ranks need 48 bits; as float32 noise their order alone counts.
    noise = ranks.argsort(dim=1).argsort(dim=1).float()
    with torch.no_grad():
        expected = reference(images, noise=noise)
        prediction, mask = model.reconstruct(images, ranks)
        loss = model.masked_mse(images, prediction, mask)
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert torch.equal(mask, expected.mask.float())
    torch.testing.assert_close(prediction, expected.logits, atol=1e-4, rtol=0)
    assert prediction.std() > 0.05


def test_position_tables() -> None:
    """Ours against the formula written out, value by value."""
    model = ours(32, 4, True)
    for table, width in ((model.encoder.pos_embed, 64), (model.decoder_pos_embed, 48)):
        torch.testing.assert_close(table.data, position_table(8, width), atol=1e-6, rtol=0)
        assert not table.requires_grad
