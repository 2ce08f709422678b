"""The weights that a run is measured by, and their file; of classifiers and of segmentation."""

from __future__ import annotations

import re
from typing import Any

from safetensors.torch import save as save_tensors
from torch import nn

from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.models.attention import choose_attention
from mae_vit.models.encoder_file import EncoderInfo, to_metadata
from mae_vit.runtime.ranks import share_weights
from mae_vit.training.engines.state import BestWeights

# What holds a network within the model that is trained; the first is that of an encoder of others.
_HOLDERS = re.compile(r"^(encoder\.network|encoder|network)\.")


def load_chosen(model: nn.Module, best: BestWeights, predictor: Predictor) -> None:
    """Loads the chosen weights, which only rank 0 needs to have, on all ranks and onto the device; collective."""
    if predictor.ranks.rank == 0:
        model.load_state_dict(best.tensors, strict=True)
    model.to(predictor.device)
    share_weights(model, predictor.ranks)
    choose_attention(model, predictor.device)


def model_bytes(
    model: nn.Module,
    facts: dict[str, Any],
    config: FinetuneConfig,
    data: FinetuneData,
    info: EncoderInfo | None,
) -> bytes:
    """Returns a network as a safetensors file: timm's names for a Vision Transformer of ours, else the network's.

    Args:
        model: holds its network as `encoder` or `network`; its other parts keep their names.
        facts: further entries of the metadata.
        config: the resolved config.
        data: gives normalization, bands and preprocessing.
        info: geometry of our encoder; None for another network.
    """
    tensors = {
        _HOLDERS.sub("", name): value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    metadata: dict[str, Any] = {"mean": data.mean, "std": data.std}
    if info is not None:
        metadata |= info.to_dict()
    else:
        metadata |= {"network": config.model.name, "img_size": list(config.model.image_hw)}
        metadata |= {**data.bands.to_entry(), **data.preprocessing.to_entry()}
    return save_tensors(tensors, metadata=to_metadata({**metadata, **facts}))
