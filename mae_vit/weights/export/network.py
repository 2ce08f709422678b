"""What is handed on: the encoder with its read-out, and a head or a decoder where there is one.

Shapes: B batch, C channels, H W pixels, D width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mae_vit.core.errors import InputError
from mae_vit.models.attention import set_fused_attention
from mae_vit.models.encoder_file import read_metadata, to_metadata
from mae_vit.models.sizes import Pool
from mae_vit.weights.encoder import PretrainedEncoder, encoder_from_weights
from mae_vit.weights.mae_decoder import Decoder, read_decoder
from mae_vit.weights.read import read_weights
from mae_vit.weights.start import Weights


class Network(nn.Module):
    """An encoder, and the linear head of a classifier.

    Attributes:
        encoder: with its read-out.
        head: (B, D) -> (B, K); None if there is none.
    """

    def __init__(self, encoder: PretrainedEncoder, head: nn.Linear | None) -> None:
        """Puts both together, in evaluation mode."""
        super().__init__()
        self.encoder, self.head = encoder, head
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Computes features (B, D), or logits (B, K), of normalized images float32 (B, C, H, W)."""
        features = self.encoder(images)
        return features if self.head is None else self.head(features)

    @property
    def output_name(self) -> str:
        """What it computes."""
        return "features" if self.head is None else "logits"

    @property
    def output_size(self) -> int:
        """D, or K."""
        return self.encoder.embed_dim if self.head is None else self.head.out_features

    @property
    def has_fc_norm(self) -> bool:
        """Whether a norm stands behind the mean, and none in front (official MAE code, `global_pool`)."""
        return isinstance(self.encoder.fc_norm, nn.LayerNorm)

    def timm_state(self) -> dict[str, Tensor]:
        """All weights by timm's names, float32 on the CPU."""
        parts: dict[str, nn.Module | None] = {
            "": self.encoder.encoder,
            "fc_norm.": self.encoder.fc_norm,
            "head.": self.head,
        }
        return {
            prefix + name: value.detach().float().cpu().clone().contiguous()
            for prefix, part in parts.items()
            if part is not None
            for name, value in part.state_dict().items()
        }


@dataclass(frozen=True)
class ExportSource:
    """What an export is made from.

    Attributes:
        asked: what the user named.
        network: the weights, float32.
        classes: names of the head's outputs; empty without a head, or where they are not known.
        decoder: of MAE; None if there is none.
    """

    asked: str
    network: Network
    classes: tuple[str, ...]
    decoder: Decoder | None

    @property
    def encoder(self) -> PretrainedEncoder:
        """The encoder with its read-out."""
        return self.network.encoder

    @property
    def start(self) -> Weights:
        """The weights as they were read."""
        return self.encoder.start

    def image_shape(self) -> tuple[int, int, int]:
        """C, H and W."""
        info = self.encoder.info
        return (info.in_chans, *info.img_size)

    def metadata(self) -> dict[str, str]:
        """Geometry, normalization, history and classes: what travels in a file's metadata."""
        more = {"pool": self.encoder.pool, **({"classes": self.classes} if self.classes else {})}
        return to_metadata({**self.encoder.info.to_dict(), **more})


def load_for_export(asked: str, pool: Pool | None, *, norm_pix_loss: bool = False) -> ExportSource:
    """Reads weights of any kind, ready to be exported.

    Args:
        asked: what `mae_vit.weights.read.read_weights` takes.
        pool: what features are read from; None for [CLS], or what a classifier reads.
        norm_pix_loss: whether an official file's decoder predicts normalized pixels.

    Raises:
        InputError: if there are none of ours, or if the read-out is a classifier's own.
    """
    start = read_weights(asked)
    head = _head_of(start)
    if pool is not None and (head is not None or "fc_norm.weight" in start.tensors):
        raise InputError(
            f"--pool {pool}: {start.source} was fine-tuned on a read-out of its own, which it keeps"
        )
    encoder = encoder_from_weights(start, pool=pool)
    # One path for all lengths of sequence, which tracers take as one operation.
    set_fused_attention(encoder, True)
    if head is not None and head.in_features != encoder.embed_dim:
        raise InputError(
            f"{start.source}: its head takes {head.in_features} values, its encoder gives {encoder.embed_dim}"
        )
    decoder = read_decoder(start, encoder.encoder, encoder.info, norm_pix_loss=norm_pix_loss)
    classes = _classes_of(start.path) if head is not None else ()
    if head is not None and len(classes) != head.out_features:
        classes = ()
    return ExportSource(asked, Network(encoder, head), tuple(classes), decoder)


def _head_of(start: Weights) -> nn.Linear | None:
    """The head of a classifier; objectives of pretraining have heads for other things."""
    weight, bias = (start.tensors.get(f"head.{name}") for name in ("weight", "bias"))
    if start.objective is not None or weight is None or weight.ndim != 2:
        return None
    if bias is None or bias.shape != weight.shape[:1]:
        raise InputError(f"{start.source}: its head.weight has no head.bias that fits")
    head = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return head


def metadata_of(path: Path) -> dict[str, Any]:
    """Reads what a safetensors file of ours says of itself; empty for all others."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    return read_metadata(path)


def _classes_of(path: Path) -> Sequence[str]:
    return [str(name) for name in metadata_of(path).get("classes") or ()]
