"""What shapes do not tell of others' weights: heads, activation, norms, normalization, from the configs beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.weights.start import another_kind

# Of timm and of transformers; the second has the normalization of the latter.
CONFIGS = ("config.json", "preprocessor_config.json")
# As LayerNorm of ours. A smaller one, as transformers' 1e-12, changes trained features by rounding alone.
_LARGEST_EPS = 1e-6


def facts_beside(path: Path) -> dict[str, Any]:
    """Returns what configs beside a file of weights say: `num_heads`, `mean`, `std`, `pool`; each may be missing.

    Raises:
        InputError: if the network computes something else than ours.
    """
    config, images = (_read(path.with_name(name)) for name in CONFIGS)
    if "hidden_size" in config:
        _check_transformers(config, str(path))
        facts = {"num_heads": config.get("num_attention_heads")}
        return facts | {"mean": images.get("image_mean"), "std": images.get("image_std")}
    if not timm.is_model(str(config.get("architecture"))):
        return {}
    with torch.device("meta"):
        model = timm.create_model(config["architecture"], num_classes=0)
    stated, given = config.get("pretrained_cfg") or {}, config.get("model_args") or {}
    facts = {"mean": stated.get("mean"), "std": stated.get("std")}
    if isinstance(model, VisionTransformer):
        check_function(model, str(path))
        if changed := sorted({"act_layer", "norm_layer"} & given.keys()):
            raise another_kind(str(path), f"its {changed[0]} is {given[changed[0]]}")
        facts["num_heads"] = given.get("num_heads") or model.blocks[0].attn.num_heads
    return facts | {"pool": "mean" if config.get("global_pool") == "avg" else "cls"}


def check_function(model: VisionTransformer, source: str) -> None:
    """Refuses what has our names and shapes and computes something else.

    Raises:
        InputError: that names the difference.
    """
    own = ViTEncoder(img_size=(1, 1), patch_size=1, embed_dim=4, depth=1, num_heads=1).blocks[0]
    other = model.blocks[0]
    facts = [("blocks are", type(other).__name__, type(own).__name__)]
    if type(other) is type(own):
        facts += [
            ("activation is", repr(other.mlp.act), repr(own.mlp.act)),
            ("norm is", _norm_name(other.norm1), _norm_name(own.norm1)),
        ]
    for what, found, ours in facts:
        if found != ours:
            raise another_kind(source, f"its {what} {found}, ours {ours}")


def _check_transformers(config: dict[str, Any], source: str) -> None:
    activation, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
    if activation != "gelu":
        raise another_kind(source, f"its activation is {activation}, ours gelu")
    if eps > _LARGEST_EPS:
        raise another_kind(
            source, f"its norm is LayerNorm of eps {eps:g}, ours LayerNorm of eps {_LARGEST_EPS:g}"
        )


def _norm_name(norm: torch.nn.Module) -> str:
    return f"{type(norm).__name__} of eps {norm.eps:g}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
