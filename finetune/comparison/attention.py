"""Attention maps of a comparison's best Vision Transformer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from finetune.comparison.rows import Row
from mae_vit.data.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.reading import open_source
from mae_vit.data.remote.folder import Located
from mae_vit.encoder import ViTEncoder
from mae_vit.inspection.attention import attention_weights, looks

_IMAGES, _PIXELS, _GAP = 6, 96, 4
_GEOMETRY = ("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio")


def best_attention(rows: Sequence[Row], data: Located) -> tuple[str, str] | None:
    """Draws where the last block of the best Vision Transformer looks.

    Args:
        rows: finished cells.
        data: the shards that they were tested on.

    Returns:
        What it is, and a data URL of a picture: a line for each of some test images, the image
        and a map for each head; None without a Vision Transformer.
    """
    for row in sorted(rows, key=lambda row: -row.values["test_top1"]):
        path = row.cell.job.folder / "model.safetensors"
        if not path.exists():
            continue
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {}).get("mae_vit", "{}"))
        if "patch_size" in told:
            who = "the mean over all patches" if told["pool"] == "mean" else "[CLS]"
            name = f"{row.cell.entry.name}, {row.cell.labels} labels for each class, seed {row.cell.seed}"
            title = f"{name}: attention of {who} in the last block, by head (brightest: most)"
            return title, _draw(row, path, told, data)
    return None


def _draw(row: Row, path: Path, told: dict[str, Any], data: Located) -> str:
    geometry = {name: told[name] for name in _GEOMETRY}
    height, width = geometry["img_size"]
    encoder = ViTEncoder(**{**geometry, "img_size": (height, width)})
    tensors = load_file(path)
    encoder.load_state_dict(
        {name: v for name, v in tensors.items() if name in encoder.state_dict()}, strict=False
    )
    details = json.loads((row.cell.job.folder / "results.json").read_text())
    index = open_index(data.folder, details["test_split"], remote=data.remote)
    source = open_source(
        index,
        "tar",
        channels=encoder.patch_embed.proj.in_channels,
        augment=Augment(img_size=(height, width)),
        memory_limit_gib=1,
    )
    chosen = np.linspace(0, len(index) - 1, min(_IMAGES, len(index))).astype(np.int64)
    images = torch.from_numpy(source.images(0, 0, chosen))
    mean, std = (torch.tensor(told[name]).view(-1, 1, 1) for name in ("mean", "std"))
    weights = attention_weights(encoder, (images.float() / 255 - mean) / std)
    maps = looks(weights, encoder.grid_size, query="mean" if told["pool"] == "mean" else "cls")
    return _to_url(images.numpy(), (maps / maps.amax(dim=(-2, -1), keepdim=True)).numpy())


def _to_url(images: np.ndarray, maps: np.ndarray) -> str:
    lines = []
    for image, heads in zip(images, maps, strict=True):
        tiles = [_tile(image.transpose(1, 2, 0))]
        tiles += [_tile((255 * head)[..., None].astype(np.uint8)) for head in heads]
        lines.append(np.concatenate(tiles, axis=1))
    stream = io.BytesIO()
    Image.fromarray(np.concatenate(lines, axis=0)).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _tile(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 1 or 3) as a square of one size with a gap around it."""
    if pixels.shape[-1] == 1:
        pixels = pixels.repeat(3, axis=-1)
    square = Image.fromarray(pixels).resize((_PIXELS, _PIXELS), Image.Resampling.NEAREST)
    return np.pad(np.asarray(square), ((_GAP, 0), (_GAP, 0), (0, 0)), constant_values=128)
