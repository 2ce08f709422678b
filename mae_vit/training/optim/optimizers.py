"""Builds optimizers by name, and lists the state tensors of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from timm.optim.lars import Lars
from torch import nn

from mae_vit.objectives.objective import Task
from mae_vit.training.optim.param_groups import decay_groups, layer_scales

OptimizerName = Literal["adamw", "adam", "sgd", "lars"]


@dataclass(frozen=True)
class OptimizerOptions:
    """An optimizer and its options.

    Attributes:
        name: "adamw", "adam", "sgd" or "lars". "adamw" with betas 0.9 / 0.999 and weight decay 0.1
            is the recipe of ViT Sec. 4.1 in its authors' code. "adam" applies weight decay as an L2
            penalty. "lars" is for linear probing (MAE Sec. A.1; arXiv 1708.03888).
        weight_decay: weight decay of the parameters that decay.
        betas: decays of the moments of "adamw" and "adam".
        momentum: momentum of "sgd" and "lars".
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
        """Names of the state tensors, each of its parameter's shape."""
        if self.counts_updates:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def counts_updates(self) -> bool:
        """Whether an update depends on the number of earlier updates (Adam's bias correction)."""
        return self.name in ("adamw", "adam")


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Builds an optimizer over the decay groups of `model`. The engine sets the learning rate before each step.

    Biases and 1-D parameters never decay, and LARS does not adapt their rate, as in the official MAE code.
    """
    scales = None
    if options.layer_decay is not None:
        assert isinstance(model, Task), "the config has refused it"
        scales = layer_scales(model, options.layer_decay)
    groups = decay_groups(model, options.weight_decay, exempt=options.exempt, lr_scales=scales)
    for group in groups:
        del group["names"]
    if options.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
        # The reference loop of the tests uses the fused kernel too: results are equal bit for bit.
        return kind(groups, lr=0.0, betas=(options.betas[0], options.betas[1]), fused=True)
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum)
    for group in groups:
        # timm adapts only the rates of parameters that decay, so with weight_decay=0 it would adapt none.
        group["always_adapt"] = group["params"][0].ndim > 1
    return Lars(groups, lr=0.0, momentum=options.momentum)
