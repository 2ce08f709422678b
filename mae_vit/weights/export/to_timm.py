"""`--to timm`: a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save as save_tensors

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import raw_normalization
from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.written import Written

WEIGHTS, CONFIG = "model.safetensors", "config.json"
# timm's model nearest to each of `mae_vit.models.sizes.SIZES`; all are one class, and the geometry is given in full.
_NAMES = {
    "S": "vit_small_patch16_224",
    "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
    "H": "vit_huge_patch14_224",
}


def create_model_arguments(source: ExportSource) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments by which timm builds the same network."""
    info, network = source.info, source.network
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
    if source.encoder.pool == "mean":
        arguments |= {"global_pool": "avg", "fc_norm": network.has_fc_norm}
    elif info.vit.class_tokens > 1:  # the model gives all tokens
        arguments["global_pool"] = ""
    return _NAMES.get(info.vit.size, "vit_tiny_patch16_224"), arguments


def write_weights(source: ExportSource, path: Path) -> None:
    """Writes the weights by timm's names, with the metadata by which `load_encoder` reads them."""
    metadata = {"format": "pt", **source.metadata()}
    # As bytes: of a full disk the library itself raises an error that is no OSError.
    path.write_bytes(save_tensors(source.network.timm_state(), metadata=metadata))


def write(source: ExportSource, folder: Path) -> Written:
    """Writes the folder, and loads it with timm.

    Raises:
        InputError: if timm has no such classifier.
    """
    config = _config(source)
    reads_tokens, count = config["global_pool"] == "", source.info.vit.class_tokens
    if reads_tokens and source.network.head is not None:
        raise InputError(
            f"{source.weights.source} classifies by the mean of {count} class tokens, which timm does not pool: "
            "--to torch keeps it, or fine-tune with finetune.pool=mean"
        )
    write_weights(source, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images, what = source.random_images(), source.network.output_name
    theirs = model(images)  # (3, D) or (3, K); (3, k + N, D) without pooling
    theirs = theirs[:, :count].mean(dim=1) if reads_tokens else theirs
    code = f"""import timm

model = timm.create_model("local-dir:.", pretrained=True)
{what} = model.eval()(images){f"[:, :{count}].mean(dim=1)" if reads_tokens else ""}
"""
    notes = []
    if source.network.head:
        notes.append("without its head, by `model.reset_classifier(0)`, it gives features")
    if reads_tokens:
        notes.append("timm does not pool the mean of several class tokens: the code takes it from the tokens")
    return Written({what: (source.network(images), theirs)}, code, tuple(notes))


def _config(source: ExportSource) -> dict[str, Any]:
    """Returns what timm reads beside the weights: the network, and the images that it takes."""
    name, arguments = create_model_arguments(source)
    classes = arguments.pop("num_classes")
    mean, std = raw_normalization(source.info)
    return {
        "architecture": name,
        "num_classes": classes,
        "num_features": source.info.vit.embed_dim,
        "global_pool": arguments.get("global_pool", "token"),
        **({"label_names": list(source.classes)} if source.classes else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": list(source.image_shape),
            "fixed_input_size": True,
            "interpolation": source.encoder.input.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": mean,
            "std": std,
            "num_classes": classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
