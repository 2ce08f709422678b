"""Activation checkpointing: less memory for more time."""

from __future__ import annotations

from functools import partial

from timm.models.vision_transformer import Block
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(model: nn.Module) -> None:
    """Makes every transformer block keep only its input and recompute the rest in the backward pass.

    Changes encoder and decoder in place; names and numbers stay the same. A block that
    runs in parts (`mae_vit.models.vit.block_for_queries`) keeps its activations.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
