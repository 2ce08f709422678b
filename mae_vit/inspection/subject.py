"""The subject of an inspection: an encoder, and its pretraining objective if the weights include it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mae_vit.config.load import load_config, read_run_config
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.checkpoints.checkpoint import STATE
from mae_vit.weights.encoder import PretrainedEncoder, encoder_from_weights
from mae_vit.weights.load import load_weights
from mae_vit.weights.mae_decoder import read_decoder
from mae_vit.weights.read import read_weights
from mae_vit.weights.start import Weights


@dataclass(frozen=True)
class InspectedEncoder:
    """An encoder under inspection.

    Attributes:
        name: weights as the user named them, for titles.
        model: encoder, read-out and normalization.
        objective: trained objective around the encoder; None if the weights hold only the encoder.
        why_no_objective: the reason, for the page.
        picture_bands: the bands that images are drawn in, from its run; None chooses.
    """

    name: str
    model: PretrainedEncoder
    objective: Objective | None
    why_no_objective: str = ""
    picture_bands: tuple[int | str, ...] | None = None


def open_subject(source: str, *, norm_pix_loss: bool = False) -> InspectedEncoder:
    """Opens the weights that `--ckpt` names, with the picture bands of their run.

    `norm_pix_loss` says that an official file's decoder predicts normalized pixels: the file does not say.

    Raises:
        InputError: if they are no Vision Transformer, or `norm_pix_loss` has no effect.
    """
    weights = read_weights(source)
    model = encoder_from_weights(weights)
    model.info.check_vit()  # other families have no attention to show
    bands = None
    if (Path(source) / "config.yaml").is_file():
        monitor = read_run_config(Path(source)).get("monitor")
        wanted = monitor.get("picture_bands") if isinstance(monitor, dict) else None
        bands = tuple(wanted) if isinstance(wanted, list) else None
    decoder = read_decoder(weights, model.encoder, model.info, norm_pix_loss=norm_pix_loss)
    if decoder is not None:
        why = "" if decoder.mae else "nothing says how many heads its decoder has"
        return InspectedEncoder(source, model, decoder.mae, why, bands)
    objective, why = _open_objective(source, weights, model)
    return InspectedEncoder(source, model, objective, why, bands)


def _open_objective(source: str, weights: Weights, model: PretrainedEncoder) -> tuple[Objective | None, str]:
    """Opens an objective other than MAE with its head, or returns None and the reason."""
    if not (weights.path / STATE).is_file() or weights.objective is None:
        if "fc_norm.weight" in weights.tensors or "head.weight" in weights.tensors:
            return None, "it was fine-tuned: there is nothing to reconstruct by"
        return (
            None,
            "the file holds an encoder alone: reconstructions need the run folder, which has the rest",
        )
    config = load_config(PretrainConfig, Path(source) / "config.yaml", imports_plugins=False)
    section, info = config.objective, model.info
    if section.uses_labels:
        return None, "it learned from labels: there is nothing to reconstruct by"
    objective = section.build(model.encoder, mean=info.mean, std=info.std, bands=info.bands)
    load_weights(weights, objective.encoder, objective, objective=section.name)
    return objective.eval(), ""
