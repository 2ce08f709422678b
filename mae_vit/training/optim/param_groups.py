"""Which parameters decay, and which learn more slowly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# What MAE's fine-tuning exempts from weight decay beside biases and 1-D parameters
# (official code, models_vit.no_weight_decay); its pretraining does not.
EMBEDDINGS = ("cls_token", "pos_embed", "dist_token")

_BLOCK = re.compile(r"encoder\.blocks\.(\d+)\.")
_FIRST = ("encoder.cls_token", "encoder.pos_embed", "encoder.patch_embed.", "dist_token")
_LAST = ("encoder.norm.", "fc_norm.", "head.", "head_dist.")


def decay_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    exempt: Sequence[str] = (),
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Splits trainable parameters: biases and 1-D parameters never decay.

    Every trainable parameter falls in exactly one group, one for each pair of scale and
    decay; frozen ones (fixed positions) in none. [CLS], mask token and learnable
    positions decay unless exempt, as in the official MAE pretraining code.

    Args:
        model: whose parameters.
        weight_decay: of those that decay.
        exempt: last parts of names that do not decay either.
        lr_scales: the rate of each parameter as a share of the run's, from
            `layer_scales`; None for one rate.

    Returns:
        Optimizer groups with keys `params`, `names`, `weight_decay` and, with
        `lr_scales`, `lr_scale`; empty groups are left out.
    """
    members: dict[tuple[float, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = parameter.ndim <= 1 or name.endswith(".bias") or name.split(".")[-1] in exempt
            scale = lr_scales[name] if lr_scales is not None else 1.0
            members.setdefault((scale, kept), []).append((name, parameter))
    groups = []
    for (scale, kept), named in sorted(members.items(), key=lambda item: item[0]):
        names, parameters = zip(*named, strict=True)
        group = {
            "params": list(parameters),
            "names": list(names),
            "weight_decay": 0.0 if kept else weight_decay,
        }
        groups.append(group if lr_scales is None else {**group, "lr_scale": scale})
    return groups


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Layer-wise rate decay (ELECTRA, arXiv 2003.10555; BEiT; MAE Sec. A.1).

    Layer 0 holds patch projection, [CLS] and positions, layer i the i-th block, the last
    one the final norm and the head; layer l of L learns at `layer_decay ** (L - l)`.

    Raises:
        ValueError: for a parameter that belongs to no layer.
    """
    layers = {name: _layer_of(name) for name, _ in model.named_parameters()}
    top = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    return {name: 1.0 if layer is None else layer_decay ** (top - layer) for name, layer in layers.items()}


def _layer_of(name: str) -> int | None:
    """The number of a parameter's layer; None for the last."""
    if block := _BLOCK.match(name):
        return int(block.group(1)) + 1
    if name.startswith(_FIRST):
        return 0
    if name.startswith(_LAST):
        return None
    raise ValueError(f"parameter {name} belongs to no layer of a Vision Transformer")


@dataclass(frozen=True)
class LayerRate:
    """One row of the table of rates.

    Attributes:
        layer: "embeddings", "block 1", ..., "head".
        lr_scale: share of the run's rate.
        lr: at the peak.
        parameters: how many.
    """

    layer: str
    lr_scale: float
    lr: float
    parameters: int


def layer_rates(model: nn.Module, layer_decay: float, lr: float) -> list[LayerRate]:
    """Lists what each layer learns at, first layer first."""
    scales = layer_scales(model, layer_decay)
    rows: dict[str, tuple[float, int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = _layer_of(name)
            title = "norm and head" if layer is None else f"block {layer}" if layer else "embeddings"
            rows[title] = scales[name], rows.get(title, (0.0, 0))[1] + parameter.numel()
    return [LayerRate(title, scale, scale * lr, count) for title, (scale, count) in rows.items()]
