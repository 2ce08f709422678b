"""`--to official`: the layout of the official MAE code, for the scripts and notebooks that read it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import timm
import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.weights.encoder import encoder_from_weights
from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.to_timm import create_model_arguments, create_model_line
from mae_vit.weights.export.verify import Verification, expected, largest_difference, random_images
from mae_vit.weights.mae_decoder import read_decoder
from mae_vit.weights.read import read_weights

WEIGHTS = "model.pth"


def write(handed: ExportSource, folder: Path) -> Verification:
    """Writes tensors alone under "model", and reads them with timm and with `read_weights`.

    Raises:
        InputError: if the official code has no such geometry.
    """
    info = handed.encoder.info
    if info.vit.class_tokens > 1:
        raise InputError(
            f"the official MAE code has one class token, not {info.vit.class_tokens}: --to timm keeps them"
        )
    if info.img_size[0] != info.img_size[1]:
        raise InputError(
            f"the official MAE code knows square images alone, not {info.img_size[0]} x {info.img_size[1]} px: "
            "--to timm keeps them"
        )
    tensors = handed.network.timm_state()
    if handed.decoder is not None:
        tensors |= handed.decoder.tensors
    content = io.BytesIO()
    torch.save({"model": tensors}, content)
    (folder / WEIGHTS).write_bytes(content.getbuffer())
    difference = max(_by_timm(handed, folder / WEIGHTS), _by_ours(handed, folder / WEIGHTS))
    return Verification(
        by=f"torch.load(weights_only=True), timm {timm.__version__} and mae-vit",
        what=handed.network.output_name,
        difference=difference,
        code=_code(handed),
        summary=f'torch.load("{WEIGHTS}", weights_only=True)["model"]: {len(tensors)} tensors'
        + (", decoder included" if handed.decoder else ""),
        notes=_notes(handed),
    )


def _by_timm(handed: ExportSource, path: Path) -> float:
    """The encoder's names are timm's."""
    tensors = torch.load(path, map_location="cpu", weights_only=True)["model"]
    name, arguments = create_model_arguments(handed)
    model = timm.create_model(name, **arguments).eval()
    model.load_state_dict({key: tensors[key] for key in handed.network.timm_state()}, strict=True)
    with torch.no_grad():
        theirs = model(random_images(handed))
    return largest_difference(expected(handed), theirs, f"timm's {handed.network.output_name}")


def _by_ours(handed: ExportSource, path: Path) -> float:
    """Read again, the file gives the same features and the same tensors to the bit."""
    info = handed.encoder.info
    # The file tells neither how many heads there are nor how images are normalized.
    start = replace(
        read_weights(str(path)),
        num_heads=info.vit.num_heads,
        mean=tuple(info.mean),
        std=tuple(info.std),
        bands=info.bands,
        preprocessing=info.preprocessing,
    )
    again = encoder_from_weights(start, pool=handed.encoder.pool)
    images = random_images(handed)
    with torch.no_grad():
        difference = largest_difference(handed.encoder(images), again(images), "features that are read again")
    found = read_decoder(start, again.encoder, again.info)
    mine: dict[str, Tensor] = handed.decoder.tensors if handed.decoder else {}
    theirs = found.tensors if found else {}
    if (
        difference
        or mine.keys() != theirs.keys()
        or not all(torch.equal(mine[key], theirs[key]) for key in mine)
    ):
        raise InputError(f"{path.name} read again is not the same to the bit: nothing was written")
    return difference


def _code(handed: ExportSource) -> str:
    """How to read the file; the official code itself is no package."""
    info = handed.encoder.info
    code = f"""import timm
import torch

weights = torch.load("{WEIGHTS}", weights_only=True)["model"]
model = {create_model_line(handed)}
model.load_state_dict({{name: weights[name] for name in model.state_dict()}}, strict=True)
{handed.network.output_name} = model.eval()(images)
"""
    if handed.decoder is None or handed.decoder.config is None:
        return code
    decoder = handed.decoder.config
    return (
        code
        + f"""
# With decoder, by the official code's models_mae.py:
# mae = MaskedAutoencoderViT(
#     img_size={info.img_size[0]}, patch_size={info.vit.patch_size}, in_chans={info.in_chans},
#     embed_dim={info.vit.embed_dim}, depth={info.vit.depth}, num_heads={info.vit.num_heads},
#     mlp_ratio={info.vit.mlp_ratio:g},
#     decoder_embed_dim={decoder.decoder_embed_dim}, decoder_depth={decoder.decoder_depth},
#     decoder_num_heads={decoder.decoder_num_heads}, norm_pix_loss={decoder.norm_pix_loss},
#     norm_layer=partial(nn.LayerNorm, eps=1e-6),
# )
# mae.load_state_dict(weights)
"""
    )


def _notes(handed: ExportSource) -> tuple[str, ...]:
    info = handed.encoder.info
    notes = []
    if info.vit.pos_embed == "learnable":
        notes.append("its position table was learned; the official code keeps it fixed: the same features")
    if handed.decoder is not None and info.in_chans != 3:
        notes.append(
            f"the official decoder's loss and pictures know 3 channels alone, not {info.in_chans}; encoder and "
            "prediction are as they were"
        )
    if info.bands is not None:
        notes.append(
            "the file does not say how bands are normalized: the card does, and `--to timm` keeps it in the file"
        )
    if handed.decoder is None and handed.network.head is None:
        notes.append("the start holds no decoder: for reconstructions, export a run folder")
    return tuple(notes)
