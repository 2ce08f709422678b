"""A file of the official MAE's layout, and a pickle that would run code."""

import argparse
from pathlib import Path

import torch
from helpers.encoders import shaken

from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.config import MAEConfig


def official(
    path: Path, *, decoder: bool, namespace: bool = False, width: int = 64, depth: int = 3, **options
) -> dict[str, torch.Tensor]:
    """Writes a file of the official layout; returns its weights."""
    encoder = ViTEncoder(
        img_size=(32, 32), patch_size=4, embed_dim=width, depth=depth, num_heads=4, pos_embed="sincos"
    )
    options = {"decoder_embed_dim": 48, "decoder_depth": 2, "decoder_num_heads": 4, **options}
    mae = shaken(MAEConfig(name="mae", **options).build(encoder, mean=[0.5] * 3, std=[0.25] * 3))
    model = {name.removeprefix("encoder."): value for name, value in mae.state_dict().items()}
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
