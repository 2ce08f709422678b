"""What is looked at: an encoder, and the objective that it was pretrained by where that came along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mae_vit.config_file import load_config
from mae_vit.coverage import load_start
from mae_vit.errors import InputError
from mae_vit.objectives.base import Objective
from mae_vit.objectives.mae import MAEConfig
from mae_vit.pretrain_config import PretrainConfig
from mae_vit.pretrained import PretrainedEncoder, from_start
from mae_vit.starts import Start, read_start

# The decoder's heads of the official code, at all sizes; no shape tells them.
_OFFICIAL_DECODER_HEADS = 16


@dataclass(frozen=True)
class Subject:
    """An encoder under inspection.

    Attributes:
        name: for people.
        model: encoder, read-out and normalization.
        objective: around the same encoder, with trained parts; None where only the encoder is there.
        why_no_objective: why, for people.
    """

    name: str
    model: PretrainedEncoder
    objective: Objective | None
    why_no_objective: str = ""


def open_subject(source: str, *, norm_pix_loss: bool = False) -> Subject:
    """Opens what `--ckpt` names.

    Args:
        source: a run folder, an `encoder.safetensors`, an official MAE file, or "timm:NAME".
        norm_pix_loss: whether an official file's decoder predicts normalized pixels, which it
            does not say; our runs do.

    Raises:
        InputError: if there is no Vision Transformer.
    """
    start = read_start(source)
    model = from_start(start)
    if not any(name.startswith(("decoder_", "mask_token", "head.", "mae.")) for name in start.tensors):
        why = "the file holds an encoder alone: reconstructions need the run folder, which has the rest"
        return Subject(source, model, None, why)
    folder = Path(source)
    if folder.is_dir() and start.objective:
        objective = _of_run(folder, start, model)
    elif start.objective == "mae":
        objective = _of_official(start, model, norm_pix_loss)
    else:
        return Subject(source, model, None, "it was fine-tuned: there is nothing to reconstruct by")
    return Subject(source, model, objective)


def _of_run(folder: Path, start: Start, model: PretrainedEncoder) -> Objective | None:
    config = load_config(PretrainConfig, folder / "config.yaml", [])
    if config.objective.uses_labels:
        return None
    objective = config.objective.build(model.encoder, mean=model.info.mean, std=model.info.std)
    load_start(start, objective.encoder, objective, objective=config.objective.name)
    return objective.eval()


def _of_official(start: Start, model: PretrainedEncoder, norm_pix_loss: bool) -> Objective:
    """The decoder's geometry from its shapes."""
    try:
        width = start.tensors["decoder_embed.weight"].shape[0]
        blocks = {name.split(".")[1] for name in start.tensors if name.startswith("decoder_blocks.")}
        config = MAEConfig(
            name="mae",
            decoder_embed_dim=width,
            decoder_depth=len(blocks),
            decoder_num_heads=_OFFICIAL_DECODER_HEADS,
            norm_pix_loss=norm_pix_loss,
        )
        objective = config.build(model.encoder, mean=model.info.mean, std=model.info.std)
    except (KeyError, ValueError, AssertionError) as error:
        raise InputError(f"{start.source}: its decoder is none of the official MAE code: {error}") from None
    coverage = load_start(start, objective.encoder, objective, objective="mae")
    if missing := [name for name in coverage.random if name.startswith("decoder")]:
        raise InputError(f"{start.source}: its decoder lacks {missing[0]}")
    return objective.eval()
