"""The optimizers by name, what each keeps for a parameter, and which ZeRO can shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from timm.optim.lars import Lars
from torch import nn

from mae_vit.training.optim.param_groups import decay_groups, layer_scales

OptimizerName = Literal["adamw", "adam", "sgd", "lars"]


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, and how it is set.

    Attributes:
        name: "adamw", which with betas 0.9 / 0.999 and weight decay 0.1 is the recipe of ViT
            Sec. 4.1 as its authors' code has it; "adam", whose weight decay is an L2 term of
            the gradient; "sgd"; "lars" (MAE Sec. A.1, linear probing; arXiv 1708.03888).
        weight_decay: of parameters that decay.
        betas: of "adamw" and "adam".
        eps: of "adamw" and "adam".
        momentum: of "sgd" and "lars".
        nesterov: of "sgd".
        trust_coefficient: of "lars".
        exempt: last parts of names of parameters that do not decay, beside biases and 1-D
            ones.
        layer_decay: each layer's rate over that of the layer after it; None for one rate.
    """

    name: OptimizerName
    weight_decay: float
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    trust_coefficient: float = 0.001
    exempt: tuple[str, ...] = ()
    layer_decay: float | None = None

    @property
    def optimizer_states(self) -> tuple[str, ...]:
        """The tensors that it keeps beside each parameter, of the parameter's shape."""
        if self.counts_updates:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def counts_updates(self) -> bool:
        """Whether its update depends on how many there were (Adam's bias correction)."""
        return self.name in ("adamw", "adam")


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Builds an optimizer over the decay groups of `model`; the rate is set before each step.

    Biases and 1-D parameters never decay; LARS does not adapt their rate either, as in
    the official MAE code.
    """
    scales = None if options.layer_decay is None else layer_scales(model, options.layer_decay)
    groups = decay_groups(model, options.weight_decay, exempt=options.exempt, lr_scales=scales)
    for group in groups:
        del group["names"]
    if options.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
        # The fused kernel updates bit for bit as a plain loop using it.
        return kind(groups, lr=0.0, betas=(options.betas[0], options.betas[1]), eps=options.eps, fused=True)
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum, nesterov=options.nesterov)
    for group in groups:
        # timm would adapt only what decays; at weight_decay=0 that is nothing.
        group["always_adapt"] = group["params"][0].ndim > 1
    return Lars(groups, lr=0.0, momentum=options.momentum, trust_coeff=options.trust_coefficient)
