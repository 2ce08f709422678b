"""Facts about third-party weights that their shapes do not show, from configs beside a file or from its content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.weights.names import another_kind

# Configs of timm and transformers beside weights; transformers has its normalization in the second.
CONFIGS = ("config.json", "preprocessor_config.json")
# eps of our LayerNorm. A smaller one, such as transformers' 1e-12, changes trained features only by rounding.
_LARGEST_EPS = 1e-6
# ViT-S of MoCo v3 (its vits.py; also in mmpretrain) and of SLIP. ViT-S of timm, DeiT, DINO and iBOT has 6 heads.
_SMALL_OF_12_HEADS = re.compile(r"arch='(vit_small|mocov3-s(mall)?)'|model='\w+_VITS16'")


def facts_beside(path: Path, content: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns facts about third-party weights that shapes do not show; configs beside a file precede its content.

    Raises InputError if the network computes another function than ours.
    """
    config, images = (_read_json(path.with_name(name)) for name in CONFIGS)
    if "hidden_size" in config:  # of transformers
        activation, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
        if activation != "gelu":
            raise another_kind(str(path), f"its activation is {activation}, ours gelu")
        if eps > _LARGEST_EPS:
            ours = f"ours LayerNorm of eps {_LARGEST_EPS:g}"
            raise another_kind(str(path), f"its norm is LayerNorm of eps {eps:g}, {ours}")
        facts = {"num_heads": config.get("num_attention_heads"), "img_size": config.get("image_size")}
        return facts | {"mean": images.get("image_mean"), "std": images.get("image_std")}
    config = config or {"architecture": content.get("arch")}
    if not timm.is_model(str(config.get("architecture"))):
        return {"num_heads": 12} if _SMALL_OF_12_HEADS.search(_said_inside(content)) else {}
    with torch.device("meta"):
        model = timm.create_model(config["architecture"], num_classes=0)
    stated, given = config.get("pretrained_cfg") or {}, config.get("model_args") or {}
    facts = {"mean": stated.get("mean"), "std": stated.get("std"), "img_size": given.get("img_size")}
    if isinstance(model, VisionTransformer):
        check_function(model, str(path))
        if changed := sorted({"act_layer", "norm_layer"} & given.keys()):
            raise another_kind(str(path), f"its {changed[0]} is {given[changed[0]]}")
        facts["num_heads"] = given.get("num_heads", model.blocks[0].attn.num_heads)
    if "global_pool" in config:
        facts["pool"] = "mean" if config["global_pool"] == "avg" else "cls"
    return facts


def _said_inside(content: Mapping[Any, Any]) -> str:
    """Returns a checkpoint's texts on its architecture: `arch`, `args.model`, and mmengine's config in `meta`."""
    model, meta = options_in(content).get("model"), content.get("meta")
    texts = map(str, meta.values() if isinstance(meta, Mapping) else ())
    return " ".join([f"arch={content.get('arch')!r} model={model!r}", *texts])


def options_in(content: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the options of the program that wrote a checkpoint: its `args`."""
    args = content.get("args")
    return args if isinstance(args, Mapping) else getattr(args, "__dict__", {})


def check_function(model: VisionTransformer, source: str) -> None:
    """Raises InputError if a network with our names and shapes has other blocks, patches, activation or norm."""
    own = ViTEncoder(img_size=(1, 1), patch_size=1, embed_dim=4, depth=1, num_heads=1).blocks[0]
    other = model.blocks[0]
    facts = [("blocks are", type(other).__name__, type(own).__name__)]
    facts += [("patches are from", type(model.patch_embed).__name__, "PatchEmbed")]
    if type(other) is type(own):
        theirs, ours = (f"{type(one.norm1).__name__} of eps {one.norm1.eps:g}" for one in (other, own))
        facts += [("activation is", repr(other.mlp.act), repr(own.mlp.act)), ("norm is", theirs, ours)]
    for what, found, ours in facts:
        if found != ours:
            raise another_kind(source, f"its {what} {found}, ours {ours}")


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
