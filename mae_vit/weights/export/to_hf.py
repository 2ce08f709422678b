"""`--to hf`: folders that transformers loads.

The folder itself is a `ViTModel` (a classifier's a `ViTForImageClassification`). Where there is a decoder, the folder
`mae` in it is a `ViTMAEForPreTraining`, whole: one folder for both would make `AutoModel` an encoder that hides 75 %
of the patches. Names are those of the files on the hub, which transformers reads.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import raw_normalization
from mae_vit.models.encoders.base import pooled
from mae_vit.objectives.mae import LAYER_NORM_EPS, MAE
from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.verify import Verification, expected, largest_difference, library, random_images

MAE_FOLDER = "mae"
_WEIGHTS, _CONFIG, _PREPROCESSOR = "model.safetensors", "config.json", "preprocessor_config.json"
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


def write(handed: ExportSource, folder: Path) -> Verification:
    """Writes the folders, and loads them with transformers.

    Raises:
        InputError: if transformers is not installed, or has no such network.
    """
    transformers = library("transformers", "hf")
    if handed.network.has_fc_norm:
        raise InputError(
            f"{handed.start.source} reads the mean of the patches through a norm of its own, which transformers' ViT "
            "has none of: --to timm keeps it"
        )
    notes: list[str] = []
    _write_encoder(handed, folder)
    with quiet(transformers):
        difference = _check_encoder(transformers, handed, folder)
    mae = _representable(handed, notes)
    height, width = handed.encoder.info.img_size
    if handed.encoder.info.bands is not None:
        notes.append("its preprocessor knows no missing values and resizes 8 bits alone: use the card's code")
    notes.append(
        "its preprocessor resizes before it crops: its box may lie half a pixel off, that of the card's code does not"
        if height == width
        else "its preprocessor resizes images whole: cut them to the shape before, as the code in the card does"
    )
    if before := _beforehand(handed):
        notes.append(f"its preprocessor leaves out what must be done before it: {before[:-1]}")
    if mae is not None:
        _write_mae(handed, folder / MAE_FOLDER)
        with quiet(transformers):
            difference = max(difference, _check_mae(transformers, handed, mae, folder / MAE_FOLDER))
    what = handed.network.output_name
    return Verification(
        by=f"transformers {transformers.__version__}",
        what=f"{what}, predictions and loss" if mae else what,
        difference=difference,
        code=_code(handed, mae is not None),
        summary=f'{_class_of(handed)}.from_pretrained("."{_pooling(handed)})'
        + (f', ViTMAEForPreTraining.from_pretrained("{MAE_FOLDER}")' if mae else ""),
        notes=tuple(notes),
    )


def _class_of(handed: ExportSource) -> str:
    return "ViTModel" if handed.network.head is None else "ViTForImageClassification"


def _pooling(handed: ExportSource) -> str:
    return ", add_pooling_layer=False" if handed.network.head is None else ""


def _representable(handed: ExportSource, notes: list[str]) -> MAE | None:
    """The objective, if `ViTMAEForPreTraining` computes it; else `notes` say why not."""
    if handed.decoder is None:
        if handed.encoder.info.objective in ("mae", "contrastive_mae", "joint"):
            notes.append("without a decoder, which these weights do not have: give the run folder instead")
        return None
    height, width = handed.encoder.info.img_size
    if height != width:
        notes.append(
            f"without its decoder: ViTMAEForPreTraining knows square images alone, not {height} x {width} px"
        )
        return None
    if handed.decoder.mae is None:
        notes.append("without its decoder: nothing says how many heads that has")
        return None
    notes += handed.decoder.notes
    if handed.encoder.info.vit.pos_embed == "learnable":
        notes.append(
            "its position table was learned; ViTMAEForPreTraining loads it and keeps it fixed in further training"
        )
    return handed.decoder.mae


def hub_names(tensors: dict[str, Tensor], *, prefix: str) -> dict[str, Tensor]:
    """Renames our tensors; queries, keys and values become three.

    Args:
        tensors: by timm's names, and a decoder's by the official ones.
        prefix: of the encoder: "vit." inside of another model.
    """
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


def geometry_of(handed: ExportSource) -> dict[str, Any]:
    """Returns what the configs of all models share."""
    info = handed.encoder.info
    height, width = info.img_size
    return {
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


def _write_encoder(handed: ExportSource, folder: Path) -> None:
    head = handed.network.head
    config = {"architectures": [_class_of(handed)], "model_type": "vit", **geometry_of(handed)}
    if head is not None:
        classes = handed.classes or tuple(f"LABEL_{number}" for number in range(head.out_features))
        config["id2label"] = {str(number): name for number, name in enumerate(classes)}
        config["label2id"] = {name: number for number, name in enumerate(classes)}
    tensors = hub_names(handed.network.timm_state(), prefix="" if head is None else "vit.")
    write_folder(handed, folder, config, tensors)


def _write_mae(handed: ExportSource, folder: Path) -> None:
    assert handed.decoder is not None
    assert handed.decoder.config is not None
    decoder = handed.decoder.config
    config = {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        **geometry_of(handed),
        "decoder_hidden_size": decoder.decoder_embed_dim,
        "decoder_num_hidden_layers": decoder.decoder_depth,
        "decoder_num_attention_heads": decoder.decoder_num_heads,
        "decoder_intermediate_size": 4 * decoder.decoder_embed_dim,
        "mask_ratio": decoder.mask_ratio,
        "norm_pix_loss": decoder.norm_pix_loss,
    }
    folder.mkdir()
    tensors = {**handed.network.timm_state(), **handed.decoder.tensors}
    write_folder(handed, folder, config, hub_names(tensors, prefix="vit."))


def write_folder(
    handed: ExportSource, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Writes weights, config and preprocessor of a model."""
    metadata = {"format": "pt", **handed.metadata()}
    (folder / _WEIGHTS).write_bytes(save_tensors(tensors, metadata=metadata))
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / _PREPROCESSOR).write_text(json.dumps(_preprocessor(handed), indent=2) + "\n")


def _beforehand(handed: ExportSource) -> str:
    """What the processors of transformers cannot do; empty if there is nothing."""
    info = handed.encoder.info
    return info.preprocessing.describe(in_bands=info.bands is not None)


def _preprocessor(handed: ExportSource) -> dict[str, Any]:
    """Our transform: the largest centered square, bicubic; other shapes are resized as a whole."""
    info = handed.encoder.info
    height, width = info.img_size
    size = {"height": height, "width": width}
    square = height == width
    mean, std = raw_normalization(info)  # the processor has one factor for all bands, so it takes raw values
    before = _beforehand(handed)
    return {
        **({"mae_vit_beforehand": before} if before else {}),
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": height} if square else size,
        "resample": _BICUBIC,
        "do_center_crop": square,
        "crop_size": size,
        "do_rescale": info.bands is None,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def load_whole(kind: Any, folder: Path, **options: Any) -> Any:
    """Loads a model that must find all of its weights, and no others.

    Raises:
        InputError: naming one that is missing or left over.
    """
    model, info = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            raise InputError(
                f"transformers' {kind.__name__}: {problem.replace('_', ' ')}: {min(map(str, info[problem]))}: "
                "nothing was written"
            )
    return model.eval()


@torch.no_grad()
def _check_encoder(transformers: Any, handed: ExportSource, folder: Path) -> float:
    options = {"add_pooling_layer": False} if handed.network.head is None else {}
    model = load_whole(getattr(transformers, _class_of(handed)), folder, **options)
    found = model(pixel_values=random_images(handed))
    theirs = found.logits if handed.network.head else pooled(found.last_hidden_state, handed.encoder.pool)
    return largest_difference(expected(handed), theirs, f"transformers' {handed.network.output_name}")


@torch.no_grad()
def _check_mae(transformers: Any, handed: ExportSource, mae: MAE, folder: Path) -> float:
    """The same masks, by the same noise: the same predictions and the same loss."""
    model = load_whole(transformers.ViTMAEForPreTraining, folder)
    images = random_images(handed)
    noise = torch.rand(len(images), mae.encoder.num_patches, generator=torch.Generator().manual_seed(1))
    theirs = model(pixel_values=images, noise=noise)
    prediction, mask = mae.reconstruct(images, noise)
    loss = mae.masked_mse(images, prediction, mask)
    return max(
        largest_difference(prediction, theirs.logits, "transformers' predictions"),
        largest_difference(loss, theirs.loss, "transformers' losses"),
    )


def _code(handed: ExportSource, has_mae: bool) -> str:
    if handed.network.head is not None:
        return """from transformers import ViTForImageClassification

model = ViTForImageClassification.from_pretrained(".").eval()
logits = model(pixel_values=images).logits
"""
    read = "[:, 0]" if handed.encoder.pool == "cls" else "[:, 1:].mean(dim=1)"
    code = f"""from transformers import ViTModel

model = ViTModel.from_pretrained(".", add_pooling_layer=False).eval()
features = model(pixel_values=images).last_hidden_state{read}
"""
    if not has_mae:
        return code
    return (
        code
        + f"""
from transformers import ViTMAEForPreTraining

mae = ViTMAEForPreTraining.from_pretrained("{MAE_FOLDER}").eval()
prediction = mae(pixel_values=images).logits
"""
    )


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and reports of loading."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
