"""`--to timm`: a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save as save_tensors

from mae_vit.core.errors import InputError
from mae_vit.models.attention import set_fused_attention
from mae_vit.models.encoder_file import raw_normalization
from mae_vit.weights.encoder import encoder_from_weights
from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.verify import Verification, expected, largest_difference, random_images
from mae_vit.weights.read import read_weights

WEIGHTS, CONFIG = "model.safetensors", "config.json"
# The same for `load_encoder`, beside files of other names: what it looks for first in a repository of the Hub.
NATIVE = "encoder.safetensors"
# timm's model nearest to each of `mae_vit.models.sizes.SIZES`; all are one class, and the geometry is given in full.
_NAMES = {
    "S": "vit_small_patch16_224",
    "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
    "H": "vit_huge_patch14_224",
}


def create_model_arguments(handed: ExportSource) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments by which timm builds the same network."""
    info, network = handed.encoder.info, handed.network
    height, width = info.img_size
    arguments: dict[str, Any] = {
        "img_size": height if height == width else (height, width),
        "patch_size": info.vit.patch_size,
        "embed_dim": info.vit.embed_dim,
        "depth": info.vit.depth,
        "num_heads": info.vit.num_heads,
        "num_classes": 0 if network.head is None else network.head.out_features,
    }
    if info.in_chans != 3:
        arguments["in_chans"] = info.in_chans
    if info.vit.class_tokens > 1:
        arguments["reg_tokens"] = info.vit.class_tokens - 1
    if info.vit.mlp_ratio != 4:
        arguments["mlp_ratio"] = info.vit.mlp_ratio
    if handed.encoder.pool == "mean":
        arguments |= {"global_pool": "avg", "fc_norm": network.has_fc_norm}
    elif info.vit.class_tokens > 1:  # the model gives all tokens
        arguments["global_pool"] = ""
    return _NAMES.get(info.vit.size, "vit_tiny_patch16_224"), arguments


def create_model_line(handed: ExportSource) -> str:
    """The same as Python."""
    name, arguments = create_model_arguments(handed)
    listed = (
        f"{key}={json.dumps(value) if isinstance(value, str) else value}" for key, value in arguments.items()
    )
    return f'timm.create_model("{name}", {", ".join(listed)})'


def _config(handed: ExportSource) -> dict[str, Any]:
    """What timm reads beside the weights: the network, and the images that it takes."""
    name, arguments = create_model_arguments(handed)
    info, classes = handed.encoder.info, arguments.pop("num_classes")
    mean, std = raw_normalization(info)
    return {
        "architecture": name,
        "num_classes": classes,
        "num_features": info.vit.embed_dim,
        "global_pool": arguments.get("global_pool", "token"),
        **({"label_names": list(handed.classes)} if handed.classes else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": list(handed.image_shape()),
            "fixed_input_size": True,
            "interpolation": handed.encoder.input.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": mean,
            "std": std,
            "num_classes": classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def write_native(handed: ExportSource, path: Path) -> None:
    """Writes the weights by timm's names with all that `load_encoder` needs, and loads them with it.

    Raises:
        InputError: if the features are not the same to the bit.
    """
    metadata = {"format": "pt", **handed.metadata()}
    path.write_bytes(save_tensors(handed.network.timm_state(), metadata=metadata))
    again = encoder_from_weights(read_weights(str(path)), pool=handed.encoder.pool)
    set_fused_attention(again, True)
    images = random_images(handed)
    with torch.no_grad():
        # As integers: what is not a number equals itself here, and is refused where exports are compared.
        ours, theirs = (encoder(images).view(torch.int32) for encoder in (handed.encoder, again))
        if not torch.equal(ours, theirs):
            raise InputError(f"{path.name} read again is not the same to the bit: nothing was written")


def write(handed: ExportSource, folder: Path) -> Verification:
    """Writes the folder, and loads it with timm."""
    _, arguments = create_model_arguments(handed)
    count = handed.encoder.info.vit.class_tokens
    reads_tokens = arguments.get("global_pool") == ""
    if reads_tokens and handed.network.head is not None:
        raise InputError(
            f"{handed.start.source} classifies by the mean of {count} class tokens, which timm does not pool: "
            "--to torch keeps it, or fine-tune with finetune.pool=mean"
        )
    write_native(handed, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(_config(handed), indent=2) + "\n")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    what = handed.network.output_name
    with torch.no_grad():
        theirs = model(random_images(handed))  # (3, D) or (3, K); (3, k + N, D) without pooling
        theirs = theirs[:, :count].mean(dim=1) if reads_tokens else theirs
    difference = largest_difference(expected(handed), theirs, f"timm's {what}")
    summary = 'timm.create_model("local-dir:.", pretrained=True)'
    code = f"""import timm

model = {summary}
{what} = model.eval()(images){f"[:, :{count}].mean(dim=1)" if reads_tokens else ""}
"""
    notes: tuple[str, ...] = (
        ("without its head, by `model.reset_classifier(0)`, it gives features",)
        if handed.network.head
        else ()
    )
    if reads_tokens:
        notes += ("timm does not pool the mean of several class tokens: the code takes it from the tokens",)
    return Verification(f"timm {timm.__version__}", what, difference, code, summary, notes)
