"""Random weights of the kinds of networks that others publish, made small, as timm stores them."""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file

_COLORS = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28]}
# By name: timm's architecture, its arguments made small, the size in pixels of its training, and its classes.
KINDS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "dinov2": ("vit_small_patch14_reg4_dinov2", {"embed_dim": 24, "depth": 2, "num_heads": 3}, 28, 0),
    "dinov3": ("vit_small_patch16_dinov3", {"embed_dim": 32, "depth": 2, "num_heads": 4}, 32, 0),
    "clip": ("vit_base_patch32_clip_224", {"embed_dim": 24, "depth": 2, "num_heads": 3}, 64, 7),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]},
        64,
        10,
    ),
    # Pools the mean, and has its norm behind it.
    "eva02": ("eva02_tiny_patch14_224", {"embed_dim": 24, "depth": 2, "num_heads": 3}, 28, 0),
    "convnext": ("convnext_atto", {"dims": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}, 64, 10),
}


def write_backbone(folder: Path, kind: str, *, seed: int = 0, interpolation: str = "bicubic") -> Path:
    """Writes FOLDER/model.safetensors and config.json, as a repository of timm's on the Hub has them."""
    architecture, arguments, side, classes = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    network = build(kind, side, classes)
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():  # none is zero or one, which would hide a missing term
            value.add_(0.1 * torch.randn_like(value))
    facts = {"input_size": [3, side, side], "num_classes": classes, "interpolation": interpolation, **_COLORS}
    known = network.pretrained_cfg
    facts |= {name: known[name] for name in ("classifier", "first_conv", "fixed_input_size")}
    described = {"architecture": architecture, "model_args": arguments, "pretrained_cfg": facts}
    (folder / "config.json").write_text(json.dumps(described))
    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_named(name: str, folder: Path, *, seed: int = 0) -> str:
    """Writes random weights of a network of timm's; returns their name, "timm:NAME@FILE"."""
    torch.manual_seed(seed)
    network = timm.create_model(name)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(0.1 * torch.randn_like(value))
    folder.mkdir(exist_ok=True)
    save_file(network.state_dict(), folder / f"{name}.safetensors")
    return f"timm:{name}@{folder / name}.safetensors"


def build(kind: str, side: int, classes: int = 0, file: Path | None = None) -> torch.nn.Module:
    """Builds the network by timm alone, in evaluation mode, with the weights of a file if given."""
    architecture, arguments, _, of_file = KINDS[kind]
    sized = (
        {"img_size": side} if timm.models.get_pretrained_cfg_value(architecture, "fixed_input_size") else {}
    )
    weights = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file), "num_classes": of_file}}
    options = {**arguments, **sized, **(weights if file else {})}
    return timm.create_model(architecture, num_classes=classes, **options).eval()
