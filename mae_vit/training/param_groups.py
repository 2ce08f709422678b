"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits trainable parameters in two: biases and 1-D parameters never decay.

    [CLS], mask token and learnable positions do, as in the official MAE
    pretraining code. Every trainable parameter falls in exactly one group; frozen
    ones (fixed positions) in none.

    Returns:
        Optimizer groups with keys `params`, `names` and `weight_decay`; empty
        groups are left out.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim <= 1 or name.endswith(".bias")
            (kept if exempt else decayed).append((name, parameter))
    groups = []
    for members, rate in ((decayed, weight_decay), (kept, 0.0)):
        if members:
            names, parameters = zip(*members, strict=True)
            groups.append({"params": list(parameters), "names": list(names), "weight_decay": rate})
    return groups
