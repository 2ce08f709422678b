"""Activation checkpointing: saves memory and costs time."""

from __future__ import annotations

from functools import partial

from timm.models.vision_transformer import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

from mae_vit.core.errors import InputError


def recompute_blocks(model: nn.Module) -> None:
    """Makes every transformer block keep only its input and recompute the rest in the backward pass.

    It changes encoder and decoder in place. Parameter names and results stay the same. A block that
    `mae_vit.models.encoders.vit.block_for_queries` runs in parts keeps its activations.

    Raises:
        InputError: if the model has no such blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise InputError(
            "train.activation_checkpointing=true has no effect on a network without transformer blocks (timm's Block)"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
