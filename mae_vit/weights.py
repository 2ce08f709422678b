"""Reading and writing encoders: safetensors with timm's keys and what is needed to use them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors

from mae_vit.encoder import PositionKind, ViTEncoder

# The safetensors header is JSON behind its length; a longer one is not ours.
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class EncoderInfo:
    """What travels with an encoder's weights. No time, path or run name: equal runs give equal bytes.

    Attributes:
        size: name in `mae_vit.encoder.SIZES` that the geometry started from.
        img_size: (H, W) in pixels.
        patch_size: P.
        in_chans: C.
        embed_dim: D.
        depth: blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over D.
        pos_embed: "learnable" or "sincos".
        mean: per-channel mean of the pixels (in 0..1) that the network was given.
        std: per-channel standard deviation.
        objective: name of the pretraining objective.
        step: optimizer steps of pretraining.
        images_seen: in these steps, counted as often as they were seen; None if not known.
        flops: model FLOPs of these steps; None if not known.
        labels: those that it was trained on, as `mae_vit.seen_labels.SeenLabels` has them; None
            for none (or in files from before they were told).
    """

    size: str
    img_size: tuple[int, int]
    patch_size: int
    in_chans: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    pos_embed: PositionKind
    mean: Sequence[float]
    std: Sequence[float]
    objective: str
    step: int
    labels: dict[str, Any] | None = None
    images_seen: int | None = None
    flops: float | None = None

    def build(self, *, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> ViTEncoder:
        """Builds an encoder of this geometry, with fresh weights."""
        return ViTEncoder(
            img_size=self.img_size,
            patch_size=self.patch_size,
            in_chans=self.in_chans,
            embed_dim=self.embed_dim,
            depth=self.depth,
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
            pos_embed=self.pos_embed,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )


def encoder_bytes(encoder: ViTEncoder, info: EncoderInfo) -> bytes:
    """Returns the content of an `encoder.safetensors`: timm's keys, float32, metadata."""
    tensors = {
        name: value.detach().float().cpu().contiguous() for name, value in encoder.state_dict().items()
    }
    return save_tensors(tensors, metadata={"mae_vit": json.dumps(asdict(info), sort_keys=True)})


def read_info(path: Path) -> EncoderInfo | None:
    """Reads what an `encoder.safetensors` says of itself; None if it is not one of ours."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            (length,) = struct.unpack("<Q", head)
            return _read_info(head + file.read(min(length, _MAX_HEADER_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _read_info(data: bytes) -> EncoderInfo:
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(_MAX_HEADER_BYTES, len(data)):
        raise ValueError("not a safetensors file")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    values = json.loads(header["__metadata__"]["mae_vit"])
    values["img_size"] = tuple(values["img_size"])
    return EncoderInfo(**values)
