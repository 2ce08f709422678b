"""Groups parameters by weight decay and by learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mae_vit.objectives.objective import Task

# MAE's fine-tuning exempts these from weight decay, besides biases and 1-D parameters
# (official code, models_vit.no_weight_decay). MAE's pretraining does not.
EMBEDDINGS = ("cls_token", "reg_token", "pos_embed", "dist_token")


def decay_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    exempt: Sequence[str] = (),
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Groups trainable parameters. Biases and 1-D parameters never decay.

    There is one group for each pair of learning-rate scale and weight decay. Every trainable
    parameter is in exactly one group; frozen ones (fixed positions) are in none. [CLS], mask token
    and learnable positions decay unless exempt, as in the official MAE pretraining code.

    Args:
        model: the model.
        weight_decay: weight decay of the parameters that decay.
        exempt: last parts of parameter names that do not decay either.
        lr_scales: factor of the learning rate by parameter name (`layer_scales`); None for one rate.

    Returns:
        Non-empty optimizer groups with keys `params`, `names`, `weight_decay` and, with
        `lr_scales`, `lr_scale`.
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


def layer_scales(model: Task, layer_decay: float) -> dict[str, float]:
    """Returns each parameter's scale under layer-wise rate decay (ELECTRA, arXiv 2003.10555; BEiT; MAE Sec. A.1).

    Layer 0 holds the embeddings, layer i the i-th block, the last layer L the final norm and the head.
    Layer l has the scale `layer_decay ** (L - l)`.

    Raises:
        ValueError: for a parameter that belongs to no layer.
    """
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    top = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    return {name: 1.0 if layer is None else layer_decay ** (top - layer) for name, layer in layers.items()}


@dataclass(frozen=True)
class LayerRate:
    """One row of the table of learning rates.

    Attributes:
        layer: "embeddings", "block 1", ..., "norm and head".
        lr_scale: ratio of the layer's learning rate to the run's.
        lr: the layer's peak learning rate.
        parameters: number of trainable parameters.
    """

    layer: str
    lr_scale: float
    lr: float
    parameters: int


def layer_rates(model: Task, layer_decay: float, lr: float) -> list[LayerRate]:
    """Lists the learning rate of each layer, first layer first."""
    scales = layer_scales(model, layer_decay)
    rows: dict[str, tuple[float, int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = model.layer_of(name)
            title = "norm and head" if layer is None else f"block {layer}" if layer else "embeddings"
            rows[title] = scales[name], rows.get(title, (0.0, 0))[1] + parameter.numel()
    return [LayerRate(title, scale, scale * lr, count) for title, (scale, count) in rows.items()]
