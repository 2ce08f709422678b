"""Small Vision Transformers, and their files."""

from pathlib import Path

import torch

from mae_vit.models.encoder_file import EncoderInfo, encoder_bytes
from mae_vit.models.geometry import ViTGeometry


def info_of(**changes) -> EncoderInfo:
    """Facts of a small encoder: 4 x 4 patches of 4 px unless changed."""
    size = {
        "img_size": (16, 16),
        "patch_size": 4,
        "in_chans": 3,
        "size": "tiny-cifar",
        "embed_dim": 32,
        "depth": 2,
    }
    size |= {"num_heads": 4, "mlp_ratio": 4.0, "pos_embed": "sincos", "class_tokens": 1}
    geometry = ViTGeometry(**{name: changes.pop(name, value) for name, value in size.items()})
    colors = {"mean": (0.4, 0.5, 0.6)[: geometry.in_chans], "std": (0.2, 0.3, 0.4)[: geometry.in_chans]}
    return EncoderInfo(geometry, **{**colors, "objective": "mae", "step": 7, **changes})


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """None of its parameters is zero or one, which would hide a missing term."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


def encoder_file(path: Path, **changes) -> Path:
    """Writes a small encoder of these facts."""
    info = info_of(**changes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoder_bytes(shaken(info.geometry.build()), info))
    return path
