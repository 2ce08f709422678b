"""`--to official`: the layout of the official MAE code, for the scripts and notebooks that read it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import timm
import torch

from mae_vit.core.errors import InputError
from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.to_timm import create_model_arguments
from mae_vit.weights.export.written import Written

WEIGHTS = "model.pth"


def write(source: ExportSource, folder: Path) -> Written:
    """Writes tensors alone under "model", and loads those of the encoder with timm, whose names are the same.

    Raises:
        InputError: if the official code has no such geometry.
    """
    info = source.info
    if info.vit.class_tokens > 1:
        raise InputError(
            f"the official MAE code has one class token, not {info.vit.class_tokens}: --to timm keeps them"
        )
    if info.img_size[0] != info.img_size[1]:
        raise InputError(
            f"the official MAE code knows square images alone, not {info.img_size[0]} x {info.img_size[1]} px: "
            "--to timm keeps them"
        )
    decoder = source.decoder.tensors if source.decoder else {}
    content = BytesIO()  # of a full disk torch itself raises an error that is no OSError
    torch.save({"model": {**source.network.timm_state(), **decoder}}, content)
    (folder / WEIGHTS).write_bytes(content.getbuffer())
    tensors = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)["model"]
    name, arguments = create_model_arguments(source)
    model = timm.create_model(name, **arguments).eval()
    model.load_state_dict({key: tensors[key] for key in source.network.timm_state()}, strict=True)
    images, what = source.random_images(), source.network.output_name
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items()).replace("'", '"')
    code = f"""import timm
import torch

weights = torch.load("{WEIGHTS}", weights_only=True)["model"]
model = timm.create_model("{name}", {listed})
model.load_state_dict({{name: weights[name] for name in model.state_dict()}}, strict=True)
{what} = model.eval()(images)
"""
    return Written(
        {what: (source.network(images), model(images))}, code + _decoder_code(source), _notes(source)
    )


def _decoder_code(source: ExportSource) -> str:
    """Returns comments on how to read the decoder: the official code is no package."""
    if source.decoder is None or source.decoder.config is None:
        return ""
    info, decoder = source.info, source.decoder.config
    return f"""
# With decoder, by the official code's models_mae.py:
# mae = MaskedAutoencoderViT(
#     img_size={info.img_size[0]}, patch_size={info.vit.patch_size}, in_chans={info.in_chans},
#     embed_dim={info.vit.embed_dim},
#     depth={info.vit.depth}, num_heads={info.vit.num_heads}, mlp_ratio={info.vit.mlp_ratio:g},
#     decoder_embed_dim={decoder.decoder_embed_dim}, decoder_depth={decoder.decoder_depth},
#     decoder_num_heads={decoder.decoder_num_heads}, norm_pix_loss={decoder.norm_pix_loss},
#     norm_layer=partial(nn.LayerNorm, eps=1e-6),
# )
# mae.load_state_dict(weights)
"""


def _notes(source: ExportSource) -> tuple[str, ...]:
    info = source.info
    notes = []
    if info.vit.pos_embed == "learnable":
        notes.append("its position table was learned; the official code keeps it fixed: the same features")
    if source.decoder is not None and info.in_chans != 3:
        notes.append(
            f"the official decoder's loss and pictures know 3 channels alone, not {info.in_chans}; encoder and "
            "prediction are as they were"
        )
    if not info.bands.photographs:
        notes.append(
            "the file does not say how bands are normalized: the card does, and `--to timm` keeps it in the file"
        )
    if source.decoder is None and source.network.head is None:
        notes.append("the weights have no decoder: for reconstructions, export a run folder")
    return tuple(notes)
