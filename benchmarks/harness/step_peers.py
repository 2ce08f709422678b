"""The same MAE step by others: ViTMAE of transformers, and the official code from a clone of its repository."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness.workloads import Workload
from mae_vit.core.errors import InputError
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.mae import LAYER_NORM_EPS

TRANSFORMERS, OFFICIAL = "transformers", "official"
OFFICIAL_FILE = "models_mae.py"


def their_step(
    workload: Workload, name: str, device: torch.device, *, official: Path | None = None
) -> Callable[[int], None]:
    """A step of a peer: the same AdamW kernel; images arrive normalized, masks by its own noise.

    Args:
        workload: whose model, batch and precision.
        name: library and attention: "transformers eager", "transformers sdpa", "official eager", "official sdpa".
        device: where it runs.
        official: clone of github.com/facebookresearch/mae, whose code is run.
    """
    library, attention = name.split()[:2]
    if library == OFFICIAL:
        assert official is not None
        model = official_model(workload, attention, official)
    else:
        model = transformers_model(workload, attention)
    model = model.to(device).train()
    if workload.compiled:
        model.compile(dynamic=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    images = torch.randn(workload.batch_size, workload.info.in_chans, *workload.info.img_size, device=device)
    options = {} if library == TRANSFORMERS else {"mask_ratio": _objective(workload).mask_ratio}

    def step(number: int) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.precision == "bf16"):
            loss = model(images, **options)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def transformers_model(workload: Workload, attention: str) -> torch.nn.Module:
    """ViTMAE, as users of transformers train it; its output begins with the loss."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    info, ours = workload.info, _objective(workload)
    config = ViTMAEConfig(
        hidden_size=info.embed_dim,
        num_hidden_layers=info.depth,
        num_attention_heads=info.num_heads,
        intermediate_size=int(info.mlp_ratio * info.embed_dim),
        decoder_hidden_size=ours.decoder_embed_dim,
        decoder_num_hidden_layers=ours.decoder_depth,
        decoder_num_attention_heads=ours.decoder_num_heads,
        decoder_intermediate_size=4 * ours.decoder_embed_dim,
        image_size=info.img_size[0],
        patch_size=info.patch_size,
        num_channels=info.in_chans,
        mask_ratio=ours.mask_ratio,
        norm_pix_loss=ours.norm_pix_loss,
        layer_norm_eps=LAYER_NORM_EPS,
        attn_implementation=attention,
    )
    return ViTMAEForPreTraining(config)


def official_model(workload: Workload, attention: str, clone: Path) -> torch.nn.Module:
    """The official model on today's timm and numpy; its output begins with the loss. Call it once a process.

    The code was written for timm 0.3.2, whose blocks took `qk_scale`, and for a numpy with `np.float`. Both are
    given to it. With "sdpa" timm's blocks use PyTorch's fused attention, as by default.
    """
    from timm.layers import set_fused_attn

    set_fused_attn(attention == "sdpa")
    sys.path.insert(0, str(clone))
    np.float = float  # type: ignore[attr-defined]
    import models_mae

    block = models_mae.Block
    models_mae.Block = lambda *sizes, qk_scale=None, **options: block(*sizes, **options)
    info, ours = workload.info, _objective(workload)
    model: torch.nn.Module = models_mae.MaskedAutoencoderViT(
        img_size=info.img_size[0],
        patch_size=info.patch_size,
        in_chans=info.in_chans,
        embed_dim=info.embed_dim,
        depth=info.depth,
        num_heads=info.num_heads,
        decoder_embed_dim=ours.decoder_embed_dim,
        decoder_depth=ours.decoder_depth,
        decoder_num_heads=ours.decoder_num_heads,
        mlp_ratio=info.mlp_ratio,
        norm_layer=partial(torch.nn.LayerNorm, eps=LAYER_NORM_EPS),
        norm_pix_loss=ours.norm_pix_loss,
    )
    return model


def check_clone(clone: Path) -> None:
    """Sees to it that there is the official model.

    Raises:
        InputError: if there is not.
    """
    if not (clone / OFFICIAL_FILE).is_file():
        raise InputError(
            f"--official {clone}: no {OFFICIAL_FILE} there; clone github.com/facebookresearch/mae"
        )


def _objective(workload: Workload) -> MAEConfig:
    objective = workload.config.objective
    assert isinstance(objective, MAEConfig)
    return objective
