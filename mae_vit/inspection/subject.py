"""The subject of an inspection: an encoder, and its pretraining objective if the weights include it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mae_vit.config.load import load_config, read_run_config
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.checkpoints.format import STATE
from mae_vit.weights.encoder import PretrainedEncoder, encoder_from_weights
from mae_vit.weights.load import load_weights
from mae_vit.weights.mae_decoder import read_decoder
from mae_vit.weights.read import read_weights
from mae_vit.weights.start import Weights


@dataclass(frozen=True)
class InspectedEncoder:
    """An encoder under inspection.

    Attributes:
        name: for titles.
        model: encoder, read-out and normalization.
        objective: around the same encoder, with trained parts; None where only the encoder is there.
        why_no_objective: the reason, for the page.
        picture_bands: the bands that images are drawn in, as its run says; None chooses.
    """

    name: str
    model: PretrainedEncoder
    objective: Objective | None
    why_no_objective: str = ""
    picture_bands: tuple[int | str, ...] | None = None


def open_subject(source: str, *, norm_pix_loss: bool = False) -> InspectedEncoder:
    """Opens what `--ckpt` names, and what its run says of pictures.

    Args:
        source: a run folder, an `encoder.safetensors`, an official MAE file, or "timm:NAME".
        norm_pix_loss: whether an official file's decoder predicts normalized pixels, which it
            does not say.

    Raises:
        InputError: if there is no Vision Transformer, or `norm_pix_loss` has no effect.
    """
    subject = _open(source, norm_pix_loss=norm_pix_loss)
    if not (Path(source) / "config.yaml").is_file():
        return subject
    monitor = read_run_config(Path(source)).get("monitor")
    wanted = monitor.get("picture_bands") if isinstance(monitor, dict) else None
    return replace(subject, picture_bands=tuple(wanted)) if isinstance(wanted, list) else subject


def _open(source: str, *, norm_pix_loss: bool) -> InspectedEncoder:
    start = read_weights(source)
    model = encoder_from_weights(start)
    assert model.info.vit  # raises for other families, which have no attention to show
    decoder = read_decoder(start, model.encoder, model.info, norm_pix_loss=norm_pix_loss)
    if decoder is not None:
        why = "" if decoder.mae else "nothing says how many heads its decoder has"
        return InspectedEncoder(source, model, decoder.mae, why)
    if (start.path / STATE).is_file() and start.objective is not None:
        return _of_run(source, start, model)
    if "fc_norm.weight" in start.tensors or "head.weight" in start.tensors:
        return InspectedEncoder(source, model, None, "it was fine-tuned: there is nothing to reconstruct by")
    why = "the file holds an encoder alone: reconstructions need the run folder, which has the rest"
    return InspectedEncoder(source, model, None, why)


def _of_run(source: str, start: Weights, model: PretrainedEncoder) -> InspectedEncoder:
    """Another objective than MAE, with its head."""
    config = load_config(PretrainConfig, Path(source) / "config.yaml", imports_plugins=False)
    if config.objective.uses_labels:
        return InspectedEncoder(
            source, model, None, "it learned from labels: there is nothing to reconstruct by"
        )
    objective = config.objective.build(
        model.encoder, mean=model.info.mean, std=model.info.std, bands=model.info.bands
    )
    load_weights(start, objective.encoder, objective, objective=config.objective.name)
    return InspectedEncoder(source, model, objective.eval())
