"""PSNR, its baseline and pictures, for all objectives that predict pixels.

Shapes: B batch, C channels, N patches, P patch size. Patches are (B, N, P*P*C) of
normalized pixels; masks (B, N), 1 = masked and counted. `valid` is bool (B, N, P*P*C), true where a
value is there, or None if none is missing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.masking import squared_distances
from mae_vit.models.patches import patchify, unpatchify
from mae_vit.objectives.missing import patch_colors, spread_known, valid_share
from mae_vit.objectives.objective import Objective


def local_average(images: Tensor, mask: Tensor, encoder: Encoder, valid: Tensor | None = None) -> Tensor:
    """Predicts each patch as one color, the mean of visible patches with weights exp(-d^2 / 2).

    Args:
        images: (B, C, H, W), normalized.
        mask: (B, N); at least one visible patch in each row.
        encoder: gives patch size, channels and grid.
        valid: leaves out missing values; a patch without any of a channel is no neighbor in that channel.

    Returns:
        (B, N, P*P*C).
    """
    patches = patchify(images, encoder.patch_size)  # (B, N, P*P*C)
    colors, known = patch_colors(patches, valid, encoder.in_chans)  # (B, N, C)
    distances = squared_distances(encoder.grid_size, images.device)  # (N, N)
    # A softmax stays finite even if all visible patches are far and every weight rounds to 0.
    weights = (-distances / 2).masked_fill(mask[:, None, :].bool(), -torch.inf).softmax(dim=-1)
    with torch.autocast(images.device.type, enabled=False):
        colors = spread_known(weights, colors, known)  # (B, N, N) @ (B, N, C)
    return colors.repeat(1, 1, encoder.patch_size**2)  # (B, N, P*P*C)


def error_sums(
    objective: Objective,
    images: Tensor,
    predictions: tuple[Tensor, Tensor],
    mask: Tensor,
    valid: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums squared errors over masked patches, in 0..1 pixels, for a prediction and its baseline.

    `masked` counts masked patches, `measured` counts them by their shares of valid values.

    Args:
        objective: gives geometry and normalization.
        images: (B, C, H, W), normalized.
        predictions: the prediction, and one without learning, each (B, N, P*P*C) in the units of `images`.
        mask: (B, N).
        valid: leaves out missing values.
    """
    p = objective.encoder.patch_size
    original = patchify(images, p)  # (B, N, P*P*C)
    pixel_std = objective.std.flatten().repeat(p * p)  # (P*P*C,)

    def total(pixels: Tensor) -> Tensor:
        errors = ((pixels.float() - original) * pixel_std).square()
        return ((errors if valid is None else errors * valid).mean(dim=-1) * mask).sum()

    return {
        "masked": mask.sum(),
        "measured": valid_share(valid, mask),
        "squared_error": total(predictions[0]),
        "squared_error_baseline": total(predictions[1]),
    }


def psnr_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Computes PSNR on masked patches in dB, that of the baseline, and the gain, from `error_sums`.

    Returns an empty dictionary if no patch was masked, or all masked values are missing. With few images this
    happens if every corrupted patch kept its embedding or got that of another patch.
    """
    if not sums["measured"]:
        return {}
    psnr, baseline = (
        # Constant images may be reconstructed exactly. The floor limits PSNR to 120 dB.
        -10 * math.log10(max(sums[name] / sums["measured"], 1e-12))
        for name in ("squared_error", "squared_error_baseline")
    )
    return {"psnr_db": psnr, "psnr_baseline_db": baseline, "psnr_gain_db": psnr - baseline}


def reconstruction_pictures(
    objective: Objective, original: Tensor, predicted: Tensor, mask: Tensor, label: str = "predicted"
) -> list[Picture]:
    """Shows masked, predicted, pasted, original.

    Args:
        objective: gives geometry and normalization.
        original: raw values (B, C, H, W).
        predicted: (B, N, P*P*C), normalized.
        mask: (B, N), 1 = masked.
        label: label of the predicted row.
    """
    p, img_size = objective.encoder.patch_size, objective.encoder.img_size
    shown = objective.denormalize(unpatchify(predicted.float(), p, img_size))  # (B, C, H, W)
    hidden = unpatchify(mask[..., None].expand(-1, -1, p * p), p, img_size)  # (B, 1, H, W)
    pixels = objective.unit(original)
    return [
        Picture("masked", pixels * (1 - hidden) + 0.5 * hidden),
        Picture(label, shown),
        Picture("pasted", pixels * (1 - hidden) + shown * hidden),
        Picture("original", pixels),
    ]
