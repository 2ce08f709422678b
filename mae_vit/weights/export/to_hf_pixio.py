"""`--to hf` of an encoder with several class tokens: transformers' `PixioModel` (arXiv 2512.15715), from 5.0.

Its config, its tensors' names and its outputs are those that the installed transformers states.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.to_hf import base_config, hub_names, write_and_load
from mae_vit.weights.export.written import Written


def write(source: ExportSource, folder: Path) -> Written:
    """Writes the folder, and loads it with transformers.

    Raises:
        InputError: if transformers has no such network.
    """
    if problem := _problem(source):
        raise InputError(f"{source.weights.source}: {problem}: --to torch keeps it")
    config = base_config(source, architecture="PixioModel", model_type="pixio")
    del config["intermediate_size"]
    count = source.info.vit.class_tokens
    config |= {"mlp_ratio": int(source.info.vit.mlp_ratio), "n_cls_tokens": count}
    model = write_and_load(source, folder, config, pixio_names(source.network.timm_state()))
    images = source.random_images()
    output = model(pixel_values=images)
    if source.encoder.pool == "cls":
        theirs, read = output.pooler_output, "pooler_output"
    else:
        theirs = output.last_hidden_state[:, count:].mean(dim=1)
        read = f"last_hidden_state[:, {count}:].mean(dim=1)"
    code = f"""from transformers import PixioModel

model = PixioModel.from_pretrained(".").eval()
features = model(pixel_values=images).{read}
"""
    notes = ["its pooler_output is the mean of the class tokens"]
    if source.decoder is not None:
        notes.append("without its decoder: transformers has none for several class tokens")
    return Written({"features": (source.network(images), theirs)}, code, tuple(notes))


def _problem(source: ExportSource) -> str:
    """Says why `PixioModel` does not compute this network; empty if it does."""
    import transformers  # optional, and slow to import

    info = source.info
    height, width = info.img_size
    if not hasattr(transformers, "PixioModel"):
        needed = f"PixioModel, which {info.vit.class_tokens} class tokens need"
        return f"transformers {transformers.__version__} has no {needed}"
    if source.network.head is not None:
        return "transformers has no classifier of several class tokens"
    if source.network.has_fc_norm:
        return "transformers has no norm after the mean of the patches"
    if height != width:
        return f"PixioModel knows square images alone, not {height} x {width} px"
    if info.vit.mlp_ratio != int(info.vit.mlp_ratio):
        return f"PixioModel has no mlp_ratio={info.vit.mlp_ratio:g}"
    return ""


def pixio_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames timm's tensors as in the files of `PixioModel`; its class tokens are one tensor (1, k, D)."""
    tokens = torch.cat([tensors["cls_token"], tensors["reg_token"]], dim=1)
    encoder = {name: value for name, value in tensors.items() if name != "reg_token"}
    return {
        name.replace(".layernorm_before.", ".norm1.").replace(".layernorm_after.", ".norm2."): value
        for name, value in hub_names({**encoder, "cls_token": tokens}, prefix="").items()
    }
