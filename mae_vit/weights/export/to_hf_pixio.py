"""`--to hf` of an encoder with several class tokens: transformers' `PixioModel` (arXiv 2512.15715), from 5.0.

Its config, its tensors' names and its outputs are those that the installed transformers states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.to_hf import geometry_of, hub_names, load_whole, quiet, write_folder
from mae_vit.weights.export.verify import Verification, expected, largest_difference, library, random_images

# Where PixioModel's names differ from ViTModel's.
_NORMS = {".layernorm_before.": ".norm1.", ".layernorm_after.": ".norm2."}


def write(handed: ExportSource, folder: Path) -> Verification:
    """Writes the folder, and loads it with transformers.

    Raises:
        InputError: if transformers is not installed, or has no such network.
    """
    transformers = library("transformers", "hf")
    _check(transformers, handed)
    write_folder(handed, folder, _config(handed), pixio_names(handed.network.timm_state()))
    with quiet(transformers), torch.no_grad():
        model = load_whole(transformers.PixioModel, folder)
        output = model(pixel_values=random_images(handed))
    count = handed.encoder.info.vit.class_tokens
    theirs = (
        output.pooler_output
        if handed.encoder.pool == "cls"
        else output.last_hidden_state[:, count:].mean(dim=1)
    )
    read = "pooler_output" if handed.encoder.pool == "cls" else f"last_hidden_state[:, {count}:].mean(dim=1)"
    notes = ["its pooler_output is the mean of the class tokens"]
    if handed.decoder is not None:
        notes.append("without its decoder: transformers has none for several class tokens")
    return Verification(
        by=f"transformers {transformers.__version__}",
        what="features",
        difference=largest_difference(expected(handed), theirs, "transformers' features"),
        code=f"""from transformers import PixioModel

model = PixioModel.from_pretrained(".").eval()
features = model(pixel_values=images).{read}
""",
        summary='PixioModel.from_pretrained(".")',
        notes=tuple(notes),
    )


def _check(transformers: Any, handed: ExportSource) -> None:
    """Checks that `PixioModel` computes this network.

    Raises:
        InputError: if it does not; names what does.
    """
    info, source = handed.encoder.info, handed.start.source
    elsewhere = "--to torch keeps it"
    if not hasattr(transformers, "PixioModel"):
        raise InputError(
            f"transformers {transformers.__version__} has no PixioModel, which {info.vit.class_tokens} class tokens "
            f"need: {elsewhere}"
        )
    if handed.network.head is not None:
        raise InputError(f"{source}: transformers has no classifier of several class tokens: {elsewhere}")
    if handed.network.has_fc_norm:
        raise InputError(f"{source}: transformers has no norm after the mean of the patches: {elsewhere}")
    if info.img_size[0] != info.img_size[1]:
        raise InputError(
            f"{source}: PixioModel knows square images alone, not {info.img_size[0]} x {info.img_size[1]} px: "
            f"{elsewhere}"
        )
    if info.vit.mlp_ratio != int(info.vit.mlp_ratio):
        raise InputError(f"{source}: PixioModel has no mlp_ratio={info.vit.mlp_ratio:g}: {elsewhere}")


def _config(handed: ExportSource) -> dict[str, Any]:
    shared = geometry_of(handed)
    del shared["intermediate_size"]
    return {
        "architectures": ["PixioModel"],
        "model_type": "pixio",
        **shared,
        "mlp_ratio": int(handed.encoder.info.vit.mlp_ratio),
        "n_cls_tokens": handed.encoder.info.vit.class_tokens,
    }


def pixio_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames timm's tensors as in the files of `PixioModel`; its class tokens are one tensor (1, k, D)."""
    tokens = torch.cat([tensors["cls_token"], tensors["reg_token"]], dim=1)
    encoder = {name: value for name, value in tensors.items() if name != "reg_token"}
    renamed = {}
    for name, value in hub_names({**encoder, "cls_token": tokens}, prefix="").items():
        for vit, pixio in _NORMS.items():
            name = name.replace(vit, pixio)
        renamed[name] = value
    return renamed
