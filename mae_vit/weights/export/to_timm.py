"""`--to timm` and `--to official`: timm's names, in timm's folder or the official MAE code's file."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save as save_tensors

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import raw_normalization
from mae_vit.weights.export.source import ExportSource, Written

# timm's model nearest to each of `mae_vit.models.sizes.SIZES`; all are one class, and arguments give the geometry.
_NAMES = {
    **{"S": "vit_small_patch16_224", "B": "vit_base_patch16_224"},
    **{"L": "vit_large_patch16_224", "H": "vit_huge_patch14_224"},
}


def _model_arguments(source: ExportSource) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments with which timm builds the same network."""
    info, network, vit = source.info, source.network, source.info.vit
    height, width = info.img_size
    arguments: dict[str, Any] = {
        "img_size": height if height == width else (height, width),
        **{name: getattr(vit, name) for name in ("patch_size", "embed_dim", "depth", "num_heads")},
        "num_classes": 0 if network.head is None else network.head.out_features,
    }
    if info.in_chans != 3:
        arguments["in_chans"] = info.in_chans
    if vit.class_tokens > 1:
        arguments["reg_tokens"] = vit.class_tokens - 1
    if vit.mlp_ratio != 4:
        arguments["mlp_ratio"] = vit.mlp_ratio
    if source.encoder.pool == "mean":
        arguments |= {"global_pool": "avg", "fc_norm": network.has_fc_norm}
    elif vit.class_tokens > 1:  # the model gives all tokens
        arguments["global_pool"] = ""
    return _NAMES.get(vit.size, "vit_tiny_patch16_224"), arguments


def write_weights(source: ExportSource, path: Path) -> None:
    """Writes the weights by timm's names, with metadata for `load_encoder`."""
    metadata = {"format": "pt", **source.metadata()}
    # Bytes: on a full disk the library would raise an error that is not an OSError.
    path.write_bytes(save_tensors(source.network.timm_state(), metadata=metadata))


def write(source: ExportSource, folder: Path) -> Written:
    """Writes the folder, and loads it with timm; raises InputError if timm has no such classifier."""
    config = _config(source)
    reads_tokens, count = config["global_pool"] == "", source.info.vit.class_tokens
    if reads_tokens and source.network.head is not None:
        raise InputError(
            f"{source.weights.source} classifies by the mean of {count} class tokens, which timm does not pool; "
            "use --to torch, or fine-tune with finetune.pool=mean"
        )
    write_weights(source, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images, what = source.random_images(), source.network.output_name
    theirs = model(images)  # (3, D) or (3, K); (3, k + N, D) without pooling
    theirs = theirs[:, :count].mean(dim=1) if reads_tokens else theirs
    code = f"""import timm

model = timm.create_model("local-dir:.", pretrained=True)
{what} = model.eval()(images){f"[:, :{count}].mean(dim=1)" if reads_tokens else ""}
"""
    note = "timm does not pool several class tokens, so the code averages them"
    return Written({what: (source.network(images), theirs)}, code, (note,) if reads_tokens else ())


def write_official(source: ExportSource, folder: Path) -> Written:
    """Writes the official MAE code's file: only tensors, under "model", which timm loads by the same names.

    Raises InputError if the official code has no such geometry.
    """
    info, vit = source.info, source.info.vit
    problem = ""
    if vit.class_tokens > 1:
        problem = f"has one class token, not {vit.class_tokens}"
    elif info.img_size[0] != info.img_size[1]:
        problem = f"supports only square images, not {info.img_size[0]} x {info.img_size[1]} px"
    if problem:
        raise InputError(f"the official MAE code {problem}; use --to timm")
    decoder = source.decoder.tensors if source.decoder else {}
    content = BytesIO()  # on a full disk torch would raise an error that is not an OSError
    torch.save({"model": {**source.network.timm_state(), **decoder}}, content)
    (folder / "model.pth").write_bytes(content.getbuffer())
    tensors = torch.load(folder / "model.pth", map_location="cpu", weights_only=True)["model"]
    name, arguments = _model_arguments(source)
    model = timm.create_model(name, **arguments).eval()
    model.load_state_dict({key: tensors[key] for key in source.network.timm_state()}, strict=True)
    images, what = source.random_images(), source.network.output_name
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items()).replace("'", '"')
    code = f"""import timm
import torch

weights = torch.load("model.pth", weights_only=True)["model"]
model = timm.create_model("{name}", {listed})
model.load_state_dict({{name: weights[name] for name in model.state_dict()}}, strict=True)
{what} = model.eval()(images)
"""
    notes = []
    if source.decoder is not None and source.decoder.config is not None:
        options = source.decoder.config.model_dump(
            exclude={"name", "mask_ratio", "mask_unit", "decode_ratio"}
        )
        listed = ", ".join(f"{key}={value}" for key, value in options.items())
        changed = "" if vit.mlp_ratio == 4 else ", once its decoder_blocks have mlp_ratio=4"
        notes.append(f"the official code's models_mae.py loads the decoder with {listed}{changed}")
    elif source.network.head is None:
        notes.append("the weights have no decoder; for reconstructions, export a run folder")
    return Written({what: (source.network(images), model(images))}, code, tuple(notes))


def _config(source: ExportSource) -> dict[str, Any]:
    """Returns timm's config: the network, and the images that it takes."""
    name, arguments = _model_arguments(source)
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
