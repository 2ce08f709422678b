"""MAE whose tokens are bfloat16 between the blocks, where training computes in bfloat16; by default they are float32.

Addition and normalization in a block then read and write half of the bytes. Weights have their usual names.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import Unpack

from mae_vit.models.encoders.base import Encoder
from mae_vit.objectives import register_objective
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.mae import MAE
from mae_vit.objectives.objective import Pixels


class MAEBf16Config(MAEConfig):
    """The `objective` section: MAE's options."""

    built_by: ClassVar[str] = f"{__name__}:MAEBf16"
    name: Literal["mae_bf16"] = "mae_bf16"  # type: ignore[assignment]


class MAEBf16(MAE):
    """MAE with bfloat16 tokens in front of the first block of encoder and decoder, and so between all blocks."""

    def __init__(self, encoder: Encoder, config: MAEBf16Config, **pixels: Unpack[Pixels]) -> None:
        """Adds the decoder to `encoder`."""
        super().__init__(encoder, config, **pixels)
        for blocks in (encoder.blocks, self.decoder_blocks):
            blocks[0].register_forward_pre_hook(_to_bf16)


def _to_bf16(block: nn.Module, tokens: tuple[Any, ...]) -> tuple[Any, ...]:
    kind = tokens[0].device.type  # "meta" where memory is counted
    lower = kind != "meta" and torch.is_autocast_enabled(kind)
    return (tokens[0].to(torch.bfloat16),) if lower else tokens


register_objective(MAEBf16Config)
