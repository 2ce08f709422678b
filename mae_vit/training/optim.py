"""Optimizers, parameter groups and the learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.optim.lars import Lars
from torch import nn

from mae_vit.core.errors import InputError
from mae_vit.objectives.objective import Task
from mae_vit.training.muon import Muon


def lr_at(step: int, *, peak_lr: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> float:
    """Returns a step's rate: linear warm-up from 0 to `peak_lr`, then half a cosine to `min_lr` (MAE Sec. A.1)."""
    if step < warmup_steps:
        return peak_lr * step / warmup_steps
    progress = max(0, step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr + (peak_lr - min_lr) * (0.5 * (1 + math.cos(math.pi * progress)))


# MAE's fine-tuning exempts these from weight decay, besides biases and 1-D parameters
# (official code, models_vit.no_weight_decay). MAE's pretraining does not.
EMBEDDINGS = ("cls_token", "reg_token", "pos_embed", "dist_token")
# A weight of a transformer block, in timm's models too; tables of relative positions end otherwise.
_OF_BLOCK = re.compile(r"blocks\.\d+\.(.*\.)?weight$")


def decay_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    exempt: Sequence[str] = (),
    lr_scales: Mapping[str, float] | None = None,
    matrices_apart: bool = False,
) -> list[dict[str, Any]]:
    """Groups trainable parameters. Biases and 1-D parameters never decay.

    There is one group for each pair of learning-rate scale and weight decay. With `matrices_apart`, matrices of
    transformer blocks have groups of their own, with `matrices=True`. Every trainable parameter is in exactly one
    group; frozen ones (fixed positions) are in none. [CLS], mask token and learnable positions decay unless
    exempt, as in the official MAE pretraining code.
    """
    members: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = parameter.ndim <= 1 or name.endswith(".bias") or name.split(".")[-1] in exempt
            scale = lr_scales[name] if lr_scales is not None else 1.0
            matrix = matrices_apart and parameter.ndim == 2 and _OF_BLOCK.search(name) is not None
            members.setdefault((scale, kept, matrix), []).append(parameter)
    return [
        {
            "params": members[scale, kept, matrices],
            "weight_decay": 0.0 if kept else weight_decay,
            **({"matrices": matrices} if matrices_apart else {}),
            **({} if lr_scales is None else {"lr_scale": scale}),
        }
        for scale, kept, matrices in sorted(members)
    ]


def layer_scales(model: Task, layer_decay: float) -> dict[str, float]:
    """Returns each parameter's scale under layer-wise rate decay (ELECTRA, arXiv 2003.10555; BEiT; MAE Sec. A.1).

    Layer 0 holds the embeddings, layer i the i-th block, the last layer L the final norm and the head.
    Layer l has the scale `layer_decay ** (L - l)`.
    """
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    top = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    return {name: 1.0 if layer is None else layer_decay ** (top - layer) for name, layer in layers.items()}


OptimizerName = Literal["adamw", "adam", "sgd", "lars", "muon"]


@dataclass(frozen=True)
class OptimizerOptions:
    """An optimizer and its options.

    Attributes:
        name: "adamw", "adam", "sgd", "lars" or "muon". "adamw" with betas 0.9 / 0.999 and weight decay 0.1
            is the recipe of ViT Sec. 4.1 in its authors' code. "adam" applies weight decay as an L2
            penalty. "lars" is for linear probing (MAE Sec. A.1; arXiv 1708.03888). "muon" is for the matrices
            of transformer blocks, with AdamW for the rest.
        exempt: last parts of parameter names that do not decay; biases and 1-D parameters never do.
        layer_decay: ratio of a layer's learning rate to the next layer's, 0 to 1; None for one rate.
    """

    name: OptimizerName
    weight_decay: float
    betas: Sequence[float] = (0.9, 0.95)
    momentum: float = 0.9
    exempt: tuple[str, ...] = ()
    layer_decay: float | None = None

    @property
    def optimizer_states(self) -> tuple[str, ...]:
        """Names of the state tensors, each of its parameter's shape; a parameter may lack some."""
        if self.counts_updates:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def counts_updates(self) -> bool:
        """Whether an update depends on the number of earlier updates (Adam's bias correction)."""
        return self.name in ("adamw", "adam", "muon")


def make_optimizer(
    model: nn.Module, options: OptimizerOptions, *, products: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """Builds an optimizer over the decay groups of `model`. The engine sets the learning rate before each step.

    `products` is the type of Muon's products.

    Biases and 1-D parameters never decay, and LARS does not adapt their rate, as in the official MAE code.
    """
    scales = None
    if options.layer_decay is not None:
        assert isinstance(model, Task), "the config has refused it"
        scales = layer_scales(model, options.layer_decay)
    muon, betas = options.name == "muon", (options.betas[0], options.betas[1])
    groups = decay_groups(
        model, options.weight_decay, exempt=options.exempt, lr_scales=scales, matrices_apart=muon
    )
    if muon:
        if not any(group["matrices"] for group in groups):
            raise InputError("optim.name=muon has no effect without transformer blocks; use optim.name=adamw")
        return Muon(groups, betas=betas, momentum=options.momentum, dtype=products)
    if options.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
        # The reference loop of the tests uses the fused kernel too: results are equal bit for bit.
        return kind(groups, lr=0.0, betas=betas, fused=True)
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum)
    for group in groups:
        # timm adapts only the rates of parameters that decay, so with weight_decay=0 it would adapt none.
        group["always_adapt"] = group["params"][0].ndim > 1
    return Lars(groups, lr=0.0, momentum=options.momentum)
