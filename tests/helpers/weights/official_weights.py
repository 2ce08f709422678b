"""The official MAE's weights, by way of transformers' model, and a pickle that would run code."""

import argparse
import math
from pathlib import Path

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining


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


def official(path: Path, *, decoder: bool, namespace: bool = False) -> dict[str, torch.Tensor]:
    """Writes a file of the official layout from transformers' model; returns its weights."""
    model = convert(theirs(32, 4, True).state_dict())
    model = {name.removeprefix("encoder."): value for name, value in model.items()}
    if not decoder:
        model = {n: v for n, v in model.items() if not n.startswith("decoder") and n != "mask_token"}
    content = {"model": model}
    if namespace:
        content |= {"args": argparse.Namespace(lr=1e-3, model="mae_vit"), "epoch": 7}
    torch.save(content, path)
    return model


class RunsCode:
    """Opens a file for writing as it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))
