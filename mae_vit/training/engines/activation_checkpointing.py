"""Activation checkpointing: memory for time."""

from __future__ import annotations

from functools import partial

from timm.models.vision_transformer import Block
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(model: nn.Module) -> None:
    """Makes every transformer block keep its input alone and recompute the rest for the backward pass.

    Encoder and decoder alike, in place; names and numbers stay the same. A block that is
    run in parts (`mae_vit.models.vit.block_for_queries`) keeps its activations.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
