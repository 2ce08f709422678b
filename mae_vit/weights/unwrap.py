"""Finds the Vision Transformer in a third-party file, in any container and under any prefix; renames to timm's names.

Containers become part of tensor names: `{"model": {"head.bias": ...}}` has "model.head.bias". A network is recognized
by its library's name of the patch projection, with blocks beside it; the text before that name is the network's
prefix. So wrappers need not be known: DDP, Lightning, DINO's teacher, an average of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mae_vit.core.errors import InputError

# Of each library the name of the patch projection, and pairs of a pattern and timm's replacement, applied in turn.
_LIBRARIES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    # Also official MAE, DINO, MoCo v3 and BEiT; BEiT's key has no bias, and DINOv2's blocks may be in chunks.
    "timm": (
        "patch_embed.proj.weight",
        ((r"\.attn\.([qv])_bias$", r".attn.\1.bias"), (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.")),
    ),
    "transformers": (
        "embeddings.patch_embeddings.projection.weight",
        (
            (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
            (r"^embeddings\.position_embeddings$", "pos_embed"),
            (r"^embeddings\.distillation_token$", "dist_token"),
            (r"^embeddings\.(\w+)$", r"\1"),
            (r"^(encoder\.)?layers?\.(\d+)\.", r"blocks.\2."),
            (r"\.layernorm_before\.", ".norm1."),
            (r"\.layernorm_after\.", ".norm2."),
            (r"\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.", r".attn.\1."),
            (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
            (r"\.(intermediate\.dense|mlp\.up_proj)\.", ".mlp.fc1."),
            (r"(?<!\.attn)\.(output\.dense|mlp\.down_proj)\.", ".mlp.fc2."),
            (r"^layernorm\.", "norm."),
            (r"^pooler\.layernorm\.", "fc_norm."),
        ),
    ),
    "mmpretrain": (
        "patch_embed.projection.weight",
        (
            (r"^patch_embed\.projection\.", "patch_embed.proj."),
            (r"^layers\.", "blocks."),
            (r"\.ln([12])\.", r".norm\1."),
            (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
            (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
            (r"^ln1\.", "norm."),
            (r"^ln2\.", "fc_norm."),
            (r"^pre_norm\.", "norm_pre."),
        ),
    ),
    "torchvision": (
        "conv_proj.weight",
        (
            (r"^conv_proj\.", "patch_embed.proj."),
            (r"^class_token$", "cls_token"),
            (r"^encoder\.pos_embedding$", "pos_embed"),
            (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
            (r"\.ln_([12])\.", r".norm\1."),
            (r"\.self_attention\.in_proj_", ".attn.qkv."),
            (r"\.self_attention\.out_proj\.", ".attn.proj."),
            (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
            (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
            (r"^encoder\.ln\.", "norm."),
            (r"^heads\.head\.", "head."),
        ),
    ),
}
# Names of the heads of classifiers that are beside the network.
_HEADS_BESIDE = {"transformers": "classifier", "mmpretrain": "head.layers.head"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Name endings of trained tensors; others, such as indices and counters, may have any type.
_TRAINED = ("weight", "bias", "pos_embed", "_token")
# torch's additions to module names: compiled, sharded and recomputed modules.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Of several networks, prefer the one that its authors use: the average, or a contrastive method's own encoder.
_FIRST = re.compile(r"(\b|_)(ema|swa|averaged?|teacher|target)(\b|_)")
_LAST = re.compile(r"(\b|_)(student|momentum)(\b|_)")


def find_network(
    content: Mapping[Any, Any], source: str, chosen: str | None = None
) -> tuple[dict[str, Tensor], str] | None:
    """Returns the tensors of a file's network by timm's names, and their place in the file; None if it has no network.

    `content` has tensors by name, in mappings of any depth; `source` names the file in messages. `chosen` is a part of
    the wanted network's prefix, such as "student"; None prefers the average or the teacher. Raises InputError if the
    choice is ambiguous, or no network is called `chosen`.
    """
    named = {_WRAPPERS.sub("", name): value for name, value in named_tensors(content).items()}
    networks: dict[str, str] = {}
    for library, (anchor, renames) in _LIBRARIES.items():
        for name in named:
            prefix = name.removesuffix(anchor)
            if prefix == name or (prefix and not prefix.endswith(".")):
                continue
            if any(name.startswith("blocks.") for name in _renamed(named, prefix, renames)):
                networks[prefix] = library
    if not networks:
        if chosen is not None:
            raise InputError(f"{source} has no Vision Transformer, so no {chosen!r}; leave out @{chosen}")
        return None
    prefix = _choose(list(networks), source, chosen)
    tensors = with_whole_qkv(_renamed(named, prefix, _LIBRARIES[networks[prefix]][1]))
    if beside := _HEADS_BESIDE.get(networks[prefix]):
        around = re.sub(r"\w+\.$", "", prefix)
        heads = {f"head.{kind}": named.get(f"{around}{beside}.{kind}") for kind in ("weight", "bias")}
        tensors |= {name: value for name, value in heads.items() if value is not None}
    if any("pre_logits." in name for name in named):  # a layer of the head, which only its library has
        tensors = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    check_values(tensors, source)
    return tensors, _describe(prefix, networks[prefix], [*networks])


def named_tensors(
    content: Mapping[Any, Any], prefix: str = "", seen: set[int] | None = None
) -> dict[str, Tensor]:
    """Returns all tensors in nested mappings, by names joined with dots; of a shared mapping by the first name."""
    tensors: dict[str, Tensor] = {}
    seen = set() if seen is None else seen
    for key, value in content.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping) and id(value) not in seen:
            seen.add(id(value))
            tensors |= named_tensors(value, f"{prefix}{key}.", seen)
    return tensors


def _renamed(
    named: Mapping[str, Tensor], prefix: str, renames: Sequence[tuple[str, str]]
) -> dict[str, Tensor]:
    """Returns the tensors under a prefix, by timm's names."""
    renamed = {}
    for name, value in named.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
            renamed[name] = value
    return renamed


def with_whole_qkv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks queries, keys and values; biases that no block has become zero, which computes the same function."""
    biases = {name.split(".attn.")[-1] for name in tensors} & {f"{part}.bias" for part in ("qkv", *"qkv")}
    for stem in [name[: -len("proj.weight")] for name in tensors if name.endswith(".attn.proj.weight")]:
        parts = {
            kind: [tensors.pop(f"{stem}{part}.{kind}", None) for part in "qkv"] for kind in ("weight", "bias")
        }
        weights = [each for each in parts["weight"] if each is not None]
        if len(weights) == 3:
            tensors[f"{stem}qkv.weight"] = torch.cat(weights)
        whole = tensors.get(f"{stem}qkv.weight")
        found = [each for each in parts["bias"] if each is not None]
        if whole is not None and len(found) == len(biases):
            zero = whole.new_zeros(len(whole) // 3)
            tensors[f"{stem}qkv.bias"] = torch.cat([zero if each is None else each for each in parts["bias"]])
    return tensors


def check_values(tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Raises InputError for quantized or packed values, whose scales are elsewhere: a cast would change the network."""
    for name, value in tensors.items():
        plain = value.dtype in _FLOATS and value.layout == torch.strided
        if not plain and name.endswith(_TRAINED):
            kind = str(value.dtype if value.layout == torch.strided else value.layout).removeprefix("torch.")
            raise InputError(
                f"{source} is quantized or packed ({name} is {kind}); give the original weights, in float32, "
                "float16 or bfloat16"
            )


def _choose(prefixes: list[str], source: str, chosen: str | None) -> str:
    """Returns the prefix of the wanted network."""
    if chosen is not None:
        fitting = [prefix for prefix in prefixes if f".{chosen}." in f".{prefix}"]
    else:
        ranks = {prefix: bool(_LAST.search(prefix)) - bool(_FIRST.search(prefix)) for prefix in prefixes}
        fitting = [prefix for prefix in prefixes if ranks[prefix] == min(ranks.values())]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(map(_shown, prefixes))
    example = f"{source}@{next(iter(fitting or prefixes)).rstrip('.')}".removesuffix("@")
    if chosen is not None and not fitting:
        raise InputError(f"{source} has no network called {chosen!r}, but {names}; give one, as {example}")
    raise InputError(f"{source} has {len(prefixes)} networks, {names}; give one, as {example}")


def _shown(prefix: str) -> str:
    return prefix.rstrip(".") or "one at its top"


def _describe(prefix: str, library: str, prefixes: list[str]) -> str:
    others = [_shown(other) for other in prefixes if other != prefix]
    parts = [f'below "{prefix}"'] if prefix else []
    parts += [f"by the names of {library}"] if library != "timm" else []
    parts += [f"chosen over {', '.join(others)} (FILE@NAME chooses another)"] if others else []
    return "; ".join(parts)
