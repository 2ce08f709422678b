"""`--to hf`: folders that transformers loads.

The folder is a `ViTModel`, for a classifier a `ViTForImageClassification`, with several class tokens a `PixioModel`
(arXiv 2512.15715; transformers from 5.0). If there is a decoder, its subfolder `mae` is a complete
`ViTMAEForPreTraining`: in a shared folder `AutoModel` would load an encoder that masks 75 % of the patches. Tensors
have the names of files on the Hub.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import raw_normalization
from mae_vit.models.masking import random_masking
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.mae import LAYER_NORM_EPS, MAE
from mae_vit.weights.export.source import ExportSource, Written

MAE_FOLDER = "mae"
_BLOCK = re.compile(r"(decoder_)?blocks\.(\d+)\.(.+)\.(weight|bias)")
_IN_BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_OUTSIDE = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
# PIL's number of bicubic.
_BICUBIC = 3


def write(source: ExportSource, folder: Path) -> Written:
    """Writes the folders, and loads them with transformers; raises InputError if transformers has no such network."""
    if source.info.vit.class_tokens > 1:
        return _write_pixio(source, folder)
    if source.network.has_fc_norm:
        raise InputError(
            f"{source.weights.source} pools the mean of the patches with its own norm, which transformers' ViT "
            "lacks; use --to timm"
        )
    images, what = source.random_images(), source.network.output_name
    theirs, code = _write_encoder(source, folder, images)
    outputs = {what: (source.network(images), theirs)}
    mae, notes = _representable(source)
    if mae is not None:
        outputs |= _write_mae(source, mae, folder / MAE_FOLDER, images)
        code += f"""
from transformers import ViTMAEForPreTraining

mae = ViTMAEForPreTraining.from_pretrained("{MAE_FOLDER}").eval()
prediction = mae(pixel_values=images).logits
"""
    return Written(outputs, code, notes)


def _hub_names(tensors: dict[str, Tensor], *, prefix: str) -> dict[str, Tensor]:
    """Renames tensors from timm's names and a decoder's official names; splits queries, keys and values."""
    renamed = {}
    for name, value in tensors.items():
        if block := _BLOCK.fullmatch(name):
            decoder, number, part, kind = block.groups()
            stem = f"decoder.decoder_layers.{number}" if decoder else f"{prefix}encoder.layer.{number}"
            if part == "attn.qkv":
                for key, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    renamed[f"{stem}.attention.attention.{key}.{kind}"] = third.contiguous()
            else:
                renamed[f"{stem}.{_IN_BLOCK[part]}.{kind}"] = value
        elif name in _OUTSIDE:
            renamed[prefix + _OUTSIDE[name]] = value
        elif name.startswith("head."):
            renamed[name.replace("head", "classifier")] = value
        else:
            renamed[f"decoder.{name}"] = value
    return renamed


def _base_config(source: ExportSource, *, architecture: str, model_type: str) -> dict[str, Any]:
    """Returns the common part of all models' configs."""
    info = source.info
    height, width = info.img_size
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": info.vit.embed_dim,
        "num_hidden_layers": info.vit.depth,
        "num_attention_heads": info.vit.num_heads,
        "intermediate_size": int(info.vit.embed_dim * info.vit.mlp_ratio),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        # transformers' own default is 1e-12.
        "layer_norm_eps": LAYER_NORM_EPS,
        "image_size": height if height == width else [height, width],
        "patch_size": info.vit.patch_size,
        "num_channels": info.in_chans,
        "qkv_bias": True,
        "torch_dtype": "float32",
    }


def _write_and_load(
    source: ExportSource, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], **options: Any
) -> Any:
    """Writes weights, config and preprocessor of a model, and loads it with transformers in evaluation mode.

    `config` names the class under "architectures"; `options` go to its `from_pretrained`. Raises InputError if names or
    shapes of the weights do not match; names one of them.
    """
    import transformers  # optional, and slow to import

    metadata = {"format": "pt", **source.metadata()}
    (folder / "model.safetensors").write_bytes(save_tensors(tensors, metadata=metadata))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor(source), indent=2) + "\n")
    (kind,) = config["architectures"]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, kind).from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **options
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            key = min(map(str, info[problem]))
            raise InputError(f"transformers' {kind}: {problem.replace('_', ' ')}: {key}; nothing was written")
    return model.eval()


def _write_encoder(source: ExportSource, folder: Path, images: Tensor) -> tuple[Tensor, str]:
    """Writes the encoder; returns transformers' features (B, D) or logits (B, K), and code that computes them."""
    head = source.network.head
    if head is None:
        config = _base_config(source, architecture="ViTModel", model_type="vit")
        tensors = _hub_names(source.network.timm_state(), prefix="")
        model = _write_and_load(source, folder, config, tensors, add_pooling_layer=False)
        tokens = model(pixel_values=images).last_hidden_state
        cls = source.encoder.pool == "cls"
        code = f"""from transformers import ViTModel

model = ViTModel.from_pretrained(".", add_pooling_layer=False).eval()
features = model(pixel_values=images).last_hidden_state{"[:, 0]" if cls else "[:, 1:].mean(dim=1)"}
"""
        return tokens[:, 0] if cls else tokens[:, 1:].mean(dim=1), code
    config = _base_config(source, architecture="ViTForImageClassification", model_type="vit")
    classes = source.classes or tuple(f"LABEL_{number}" for number in range(head.out_features))
    config["id2label"] = {str(number): name for number, name in enumerate(classes)}
    config["label2id"] = {name: number for number, name in enumerate(classes)}
    tensors = _hub_names(source.network.timm_state(), prefix="vit.")
    code = """from transformers import ViTForImageClassification

model = ViTForImageClassification.from_pretrained(".").eval()
logits = model(pixel_values=images).logits
"""
    return _write_and_load(source, folder, config, tensors)(pixel_values=images).logits, code


def _write_mae(
    source: ExportSource, mae: MAE, folder: Path, images: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Writes the MAE; returns predictions and loss of both libraries, with the same masks."""
    assert source.decoder is not None
    assert source.decoder.config is not None
    decoder: MAEConfig = source.decoder.config
    config = {
        **_base_config(source, architecture="ViTMAEForPreTraining", model_type="vit_mae"),
        "decoder_hidden_size": decoder.decoder_embed_dim,
        "decoder_num_hidden_layers": decoder.decoder_depth,
        "decoder_num_attention_heads": decoder.decoder_num_heads,
        "decoder_intermediate_size": 4 * decoder.decoder_embed_dim,
        "mask_ratio": decoder.mask_ratio,
        "norm_pix_loss": decoder.norm_pix_loss,
    }
    folder.mkdir()
    tensors = {**source.network.timm_state(), **source.decoder.tensors}
    model = _write_and_load(source, folder, config, _hub_names(tensors, prefix="vit."))
    noise = torch.rand(len(images), mae.encoder.num_patches, generator=torch.Generator().manual_seed(1))
    theirs = model(pixel_values=images, noise=noise)
    masking = random_masking(noise, mae.mask_ratio)
    prediction = mae.predict_all(images, masking)
    loss = mae.squared_error(images, prediction)[masking.mask.bool()].mean()
    return {"predictions": (prediction, theirs.logits), "loss": (loss, theirs.loss)}


def _write_pixio(source: ExportSource, folder: Path) -> Written:
    """Writes a `PixioModel`; raises InputError if transformers has no such network."""
    import transformers  # optional, and slow to import

    info, vit = source.info, source.info.vit
    for problem, missing in (
        (not hasattr(transformers, "PixioModel"), f"PixioModel, which {vit.class_tokens} class tokens need"),
        (source.network.head is not None, "classifier of several class tokens"),
        (source.network.has_fc_norm, "norm after the mean of the patches"),
        (info.img_size[0] != info.img_size[1], "PixioModel of images that are not square"),
        (vit.mlp_ratio != int(vit.mlp_ratio), f"PixioModel of mlp_ratio={vit.mlp_ratio:g}"),
    ):
        if problem:
            raise InputError(f"{source.weights.source}: transformers has no {missing}; use --to torch")
    config = _base_config(source, architecture="PixioModel", model_type="pixio")
    del config["intermediate_size"]
    config |= {"mlp_ratio": int(vit.mlp_ratio), "n_cls_tokens": vit.class_tokens}
    state = source.network.timm_state()
    state["cls_token"] = torch.cat([state["cls_token"], state.pop("reg_token")], dim=1)  # (1, k, D)
    tensors = {
        name.replace(".layernorm_before.", ".norm1.").replace(".layernorm_after.", ".norm2."): value
        for name, value in _hub_names(state, prefix="").items()
    }
    images = source.random_images()
    output = _write_and_load(source, folder, config, tensors)(pixel_values=images)
    theirs, read = output.pooler_output, "pooler_output"  # the mean of the class tokens
    if source.encoder.pool == "mean":
        theirs = output.last_hidden_state[:, vit.class_tokens :].mean(dim=1)
        read = f"last_hidden_state[:, {vit.class_tokens}:].mean(dim=1)"
    code = f"""from transformers import PixioModel

model = PixioModel.from_pretrained(".").eval()
features = model(pixel_values=images).{read}
"""
    note = "without its decoder, as transformers has none for several class tokens"
    return Written({"features": (source.network(images), theirs)}, code, (note,) if source.decoder else ())


def _representable(source: ExportSource) -> tuple[MAE | None, tuple[str, ...]]:
    """Returns the objective if `ViTMAEForPreTraining` can compute it, and notes."""
    decoder, (height, width) = source.decoder, source.info.img_size
    if decoder is None:
        lost = source.info.objective in ("mae", "contrastive_mae", "joint")
        return None, ("without a decoder; for one, export the run folder",) if lost else ()
    if height != width:
        return None, (f"without its decoder, as ViTMAEForPreTraining has none for {height} x {width} px",)
    if decoder.mae is None:
        return None, ("without its decoder, whose number of heads is not known",)
    unit = decoder.mae.mask_unit
    squares = f"ViTMAEForPreTraining masks single patches, training squares of {unit} x {unit}"
    return decoder.mae, (*decoder.notes, *[squares] * (unit > 1))


def _preprocessor(source: ExportSource) -> dict[str, Any]:
    """Returns our transform as a config: the largest centered square, bicubic; other shapes are resized whole."""
    height, width = source.info.img_size
    size = {"height": height, "width": width}
    square = height == width
    # The processor has one factor for all bands, so it takes raw values.
    mean, std = raw_normalization(source.info)
    return {
        **({"mae_vit_beforehand": source.preparation} if source.preparation else {}),
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": height} if square else size,
        "resample": _BICUBIC,
        "do_center_crop": square,
        "crop_size": size,
        "do_rescale": source.info.bands.photographs,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }
