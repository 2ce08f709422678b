"""Activation checkpointing: saves memory and costs time."""

from __future__ import annotations

from functools import partial

from timm.models.vision_transformer import Block
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(model: nn.Module) -> None:
    """Makes every transformer block keep only its input and recompute the rest in the backward pass.

    It changes encoder and decoder in place. Parameter names and results stay the same. A block that
    `mae_vit.models.vit.block_for_queries` runs in parts keeps its activations.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
