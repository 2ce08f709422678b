"""What shapes do not tell of others' weights: heads, activation, norms, normalization.

The configs beside the weights say it, or the name of the architecture within the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
# ViT-S of MoCo v3 (its vits.py), in mmpretrain too, and of SLIP; that of timm, DeiT, DINO and iBOT has 6 heads.
_SMALL_OF_12_HEADS = re.compile(r"arch='(vit_small|mocov3-s(mall)?)'|model='\w+_VITS16'")


def facts_beside(path: Path, content: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns what is said of others' weights: `num_heads`, `mean`, `std`, `pool`; each may be missing.

    Args:
        path: file of the weights. Configs beside it go before what it says itself.
        content: content of the file.

    Raises:
        InputError: if the network computes something else than ours.
    """
    config, images = (_read(path.with_name(name)) for name in CONFIGS)
    if "hidden_size" in config:
        _check_transformers(config, str(path))
        facts = {"num_heads": config.get("num_attention_heads")}
        return facts | {"mean": images.get("image_mean"), "std": images.get("image_std")}
    config = config or {"architecture": content.get("arch")}
    if not timm.is_model(str(config.get("architecture"))):
        return {"num_heads": 12} if _SMALL_OF_12_HEADS.search(_said_inside(content)) else {}
    with torch.device("meta"):
        model = timm.create_model(config["architecture"], num_classes=0)
    stated, given = config.get("pretrained_cfg") or {}, config.get("model_args") or {}
    facts = {"mean": stated.get("mean"), "std": stated.get("std")}
    if isinstance(model, VisionTransformer):
        check_function(model, str(path))
        if changed := sorted({"act_layer", "norm_layer"} & given.keys()):
            raise another_kind(str(path), f"its {changed[0]} is {given[changed[0]]}")
        facts["num_heads"] = given.get("num_heads") or model.blocks[0].attn.num_heads
    if "global_pool" in config:
        facts["pool"] = "mean" if config["global_pool"] == "avg" else "cls"
    return facts


def _said_inside(content: Mapping[Any, Any]) -> str:
    """Returns what a checkpoint says of its architecture: `arch`, `args.model`, and mmengine's config in `meta`."""
    args, meta = content.get("args"), content.get("meta")
    model = args.get("model") if isinstance(args, Mapping) else getattr(args, "model", None)
    texts = map(str, meta.values() if isinstance(meta, Mapping) else ())
    return " ".join([f"arch={content.get('arch')!r} model={model!r}", *texts])


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
