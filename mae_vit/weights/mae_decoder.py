"""Reads the decoder of a trained MAE, if the weights contain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.encoders.vit import sincos_position_table
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.mae import MAE
from mae_vit.training.checkpoints.checkpoint import STATE, read_description
from mae_vit.weights.read import Weights

# All decoders of the official MAE code have this width and this number of heads.
_OFFICIAL_WIDTH, _OFFICIAL_HEADS = 512, 16
_NAMES = ("decoder_", "mask_token")


@dataclass(frozen=True)
class Decoder:
    """A decoder and its options.

    Attributes:
        tensors: tensors by the official names, which are also ours: `decoder_embed.weight` and so on.
        config: options of the objective; None if the number of heads is unknown.
        mae: the objective around the encoder; None as `config`.
        notes: assumptions, one sentence each.
    """

    tensors: dict[str, Tensor]
    config: MAEConfig | None
    mae: MAE | None
    notes: tuple[str, ...]


def read_decoder(weights: Weights, encoder: Encoder, info: EncoderInfo) -> Decoder | None:
    """Reads the decoder of an MAE, also inside a joint objective; None if there is none.

    The objective wraps `encoder`, which has these weights. Raises InputError if the decoder does not match the encoder.
    """
    prefix = "mae." if weights.objective == "joint" else ""
    tensors = {
        name.removeprefix(prefix): value.detach().float().contiguous()
        for name, value in weights.tensors.items()
        if name.startswith(tuple(prefix + name for name in _NAMES))
    }
    if weights.objective not in ("mae", "contrastive_mae", "joint") or "decoder_embed.weight" not in tensors:
        return None
    width = tensors["decoder_embed.weight"].shape[0]
    if width % 4 == 0:
        # Some files lack the table, which is fixed.
        tensors.setdefault(
            "decoder_pos_embed", sincos_position_table(encoder.grid_size, width, encoder.num_prefix_tokens)
        )
    options: dict[str, Any] = {}
    if isinstance(normalized := weights.options.get("norm_pix_loss"), bool):
        ratio = weights.options.get("mask_ratio")
        ratio = ratio if isinstance(ratio, float) and 0 < ratio < 1 else 0.75
        options = {"norm_pix_loss": normalized, "mask_ratio": ratio}
    if (weights.path / STATE).is_file():  # one of our checkpoints
        start = f"objective.{prefix}"
        identity = read_description(weights.path)["identity"]
        options = {key.removeprefix(start): value for key, value in identity.items() if key.startswith(start)}
    heads = options.get("decoder_num_heads") or (_OFFICIAL_HEADS if width == _OFFICIAL_WIDTH else None)
    notes = []
    if "norm_pix_loss" not in options:
        notes.append(
            "the file does not say whether its decoder predicts normalized pixels; using norm_pix_loss=false, "
            "mask_ratio=0.75"
        )
    if heads is None:
        return Decoder(tensors, None, None, tuple(notes))
    blocks = {name.split(".")[1] for name in tensors if name.startswith("decoder_blocks.")}
    config = MAEConfig(
        name="mae",
        mask_ratio=options.get("mask_ratio", 0.75),
        mask_unit=options.get("mask_unit", 1),
        decoder_embed_dim=width,
        decoder_depth=max(1, len(blocks)),
        decoder_num_heads=heads,
        norm_pix_loss=options.get("norm_pix_loss", False),
    )
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    try:
        config.check(info.geometry, 0)
        mae = MAE(encoder, config, mean=info.mean, std=info.std, bands=info.bands)
        mae.load_state_dict({**state, **tensors}, strict=True)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise InputError(f"{weights.source}: its decoder does not fit its encoder ({reason})") from None
    return Decoder(tensors, config, mae.eval(), tuple(notes))
