"""Facts about third-party weights that their shapes do not show, from configs beside a file or from its content."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from pydantic import ValidationError
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_vit.config.encoders import section_class
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json
from mae_vit.core.messages import count_of
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.geometry import Geometry
from mae_vit.weights.names import another_kind

if TYPE_CHECKING:
    from mae_vit.weights.timm_network import TimmNetwork

# Configs of timm and transformers beside weights; transformers has its normalization in the second.
CONFIGS = ("config.json", "preprocessor_config.json")
# eps of our LayerNorm. A smaller one, such as transformers' 1e-12, changes trained features only by rounding.
_LARGEST_EPS = 1e-6
# Parts of other encoders (layer scale, registers, a norm before the blocks, rotary positions), without which the
# remaining weights compute another function.
_OWN = re.compile(r"blocks\.\d+\.(norm1|attn\.qkv|attn\.proj|norm2|mlp\.fc1|mlp\.fc2)\.(weight|bias)")
_FOREIGN = re.compile(
    r"(blocks|norm_pre|attn_pool)\.|reg_token|register|storage_tokens|dist_token|rope|rel_pos"
)
# ViT-S of MoCo v3 (its vits.py; also in mmpretrain) and of SLIP. ViT-S of timm, DeiT, DINO and iBOT has 6 heads.
_SMALL_OF_12_HEADS = re.compile(r"arch='(vit_small|mocov3-s(mall)?)'|model='\w+_VITS16'")


def facts_beside(path: Path, content: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns facts about third-party weights that shapes do not show; configs beside a file precede its content.

    Raises InputError if the weights, of transformers, compute another function than ours.
    """
    config = config_beside(path)
    if "hidden_size" not in config:
        return _facts_inside(path, content)
    activation, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
    if activation != "gelu":
        raise another_kind(str(path), f"its activation is {activation}, ours gelu")
    if eps > _LARGEST_EPS:
        ours = f"ours LayerNorm of eps {_LARGEST_EPS:g}"
        raise another_kind(str(path), f"its norm is LayerNorm of eps {eps:g}, {ours}")
    images = config_beside(path, CONFIGS[1])
    facts = {"num_heads": config.get("num_attention_heads"), "img_size": config.get("image_size")}
    return facts | {"mean": images.get("image_mean"), "std": images.get("image_std")}


def facts_of_timm(
    network: TimmNetwork, tensors: Mapping[str, Tensor], path: Path, *, named: bool
) -> dict[str, Any]:
    """Returns facts about weights of a network of timm's that is ours: `named` by the user, else by a config beside it.

    A config may be written by hand, to tell the number of heads alone. Raises InputError if the tensors are not of the
    network that was named.
    """
    model, config = network.model, {} if named else config_beside(path)
    stated = network.config.to_dict() if named else config.get("pretrained_cfg") or {}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    other = [name for name in shapes if name in tensors and tensors[name].shape != shapes[name]]
    if named and (differing := [name for name in other if name != "pos_embed"]):
        there, here = (list(one[differing[0]].shape) for one in (tensors, model.state_dict()))
        raise InputError(f"{path} is not of {network.name}: {differing[0]} is {there} there, {here} in timm")
    # With a norm behind the mean, the weights say it themselves.
    by_name = model.global_pool if named and "fc_norm.weight" not in tensors else None
    pool = config.get("global_pool", by_name)
    return {
        "mean": stated.get("mean"),
        "std": stated.get("std"),
        "img_size": network.arguments.get("img_size") if other else model.patch_embed.img_size,
        "num_heads": model.blocks[0].attn.num_heads,
        "pool": pool and ("mean" if pool == "avg" else "cls"),
    }


def _facts_inside(path: Path, content: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the number of heads of a network that a checkpoint names."""
    if timm.is_model(name := str(content.get("arch"))):
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=0)
        if not isinstance(model, VisionTransformer):
            return {}
        if not is_ours(model):
            raise another_kind(str(path), f"it says that it is {name}")
        return {"num_heads": model.blocks[0].attn.num_heads}
    return {"num_heads": 12} if _SMALL_OF_12_HEADS.search(_said_inside(content)) else {}


def _said_inside(content: Mapping[Any, Any]) -> str:
    """Returns a checkpoint's texts on its architecture: `arch`, `args.model`, and mmengine's config in `meta`."""
    model, meta = options_in(content).get("model"), content.get("meta")
    texts = map(str, meta.values() if isinstance(meta, Mapping) else ())
    return " ".join([f"arch={content.get('arch')!r} model={model!r}", *texts])


def options_in(content: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the options of the program that wrote a checkpoint: its `args`."""
    args = content.get("args")
    return args if isinstance(args, Mapping) else getattr(args, "__dict__", {})


def is_ours(model: nn.Module) -> bool:
    """Returns whether our Vision Transformer computes the same function as a network of timm's."""
    if not isinstance(model, VisionTransformer) or difference_of(model.state_dict()):
        return False
    own = ViTEncoder(img_size=(1, 1), patch_size=1, embed_dim=4, depth=1, num_heads=1).blocks[0]
    other = model.blocks[0]
    if type(other) is not type(own) or type(model.patch_embed) is not PatchEmbed:
        return False
    facts = [(repr(block.mlp.act), type(block.norm1), block.norm1.eps) for block in (own, other)]
    return facts[0] == facts[1]


def difference_of(names: Collection[str], class_tokens: int = 1) -> str:
    """Words how tensors by timm's names belong to another Vision Transformer than ours; empty if they do not."""
    own = {"reg_token"} if class_tokens > 1 else set()
    foreign = [
        name for name in names if _FOREIGN.match(name) and name not in own and not _OWN.fullmatch(name)
    ]
    if "dist_token" in foreign:
        return "it was distilled, so its blocks expect a second token"
    if foreign:
        return f"ours has no {foreign[0]} ({count_of(len(foreign), 'such tensor')})"
    if "patch_embed.proj.weight" in names and "cls_token" not in names:
        return "it has no class token, ours has one"
    return ""


def checked_geometry(geometry: Geometry | None, metadata: dict[str, Any], path: Path) -> Geometry | None:
    """Raises InputError for metadata of ours that a config could not state; returns the geometry."""
    try:
        for name, least in (("mean", -inf), ("std", 0)):
            if not all(least < value < inf for value in metadata.get(name) or ()):
                raise ValueError(f"{name}={metadata[name]}: must be finite, and std above 0")
        if metadata.get("pool") not in (None, "cls", "mean"):
            raise ValueError(f'pool="{metadata["pool"]}": must be "cls" or "mean"')
        if geometry is not None and hasattr(geometry, "num_heads"):
            section_class(geometry.family, path).model_validate(geometry.to_config()).geometry()
    except (TypeError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = (
                f"{first['loc'][0]}={first['input']!r}: not possible" if first["loc"] else plain_reason(error)
            )
        raise InputError(f"{path}: its metadata are damaged ({reason}); copy it again") from None
    return geometry


def plain_reason(error: ValidationError) -> str:
    """Returns what a value that is not possible should be."""
    return error.errors()[0]["msg"].removeprefix("Value error, ")


def config_beside(path: Path, name: str = CONFIGS[0]) -> dict[str, Any]:
    """Reads a config beside a file; empty if it is missing or damaged."""
    with suppress(OSError, ValueError):
        content = read_json(path.with_name(name))
        return content if isinstance(content, dict) else {}
    return {}
