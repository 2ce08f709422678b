"""Errors, PSNR, its baseline and pictures, for all objectives that predict pixels.

Shapes: B batch, C channels, N patches, P patch size. Patches are (B, N, P*P*C) of normalized pixels; masks (B, N),
1 = masked and counted; `valid` bool (B, N, P*P*C), true = present, or None if no value is missing. With None, or a mask
that is true everywhere, results equal those without masks to the bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.masking import squared_distances
from mae_vit.models.patches import patchify, patchify_bands, unpatchify
from mae_vit.objectives.objective import Objective

# Added to each patch's variance under norm_pix_loss, as in the official code.
TARGET_VARIANCE_EPS = 1e-6


def weigh(errors: Tensor, valid: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """Multiplies errors (B, M, P*P*C) by weights: 0 for missing values, and equal weights for an image's other values.

    Each image has the same sum of weights, however many values it misses, so the split of a batch does not change the
    mean. An image without any valid value has no loss. `mask` (B, M) is 1 where the caller counts a patch; None
    counts all.
    """
    if valid is None:
        return errors
    counted = valid if mask is None else valid & (mask > 0)[..., None]
    total = valid[0].numel() if mask is None else (mask > 0).sum(dim=1) * valid.shape[-1]  # values, or (B,)
    share = total / counted.sum(dim=(1, 2)).clamp(min=1)  # (B,)
    return errors * (valid * share[:, None, None])


def standardize_patches(patches: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes each patch (B, N, P*P*C) by mean and unbiased variance of its valid values (MAE Sec. 4.1).

    Returns normalized patches, 0 where a value is missing; mean and scale (B, N, 1), which undo it.
    """
    if valid is None:
        mean = patches.mean(dim=-1, keepdim=True)
        centered = patches - mean
        degrees: Tensor | int = patches.shape[-1] - 1
    else:
        count = valid.sum(dim=-1, keepdim=True)  # (B, N, 1)
        mean = patches.sum(dim=-1, keepdim=True) / count.clamp(min=1)
        centered = (patches - mean) * valid
        degrees = (count - 1).clamp(min=1)
    # torch.var() takes three times as long on these short rows.
    variance = centered.square().sum(dim=-1, keepdim=True) / degrees  # (B, N, 1)
    scale = (variance + TARGET_VARIANCE_EPS).sqrt()
    return centered / scale, mean, scale


def local_average(images: Tensor, mask: Tensor, encoder: Encoder, valid: Tensor | None = None) -> Tensor:
    """Predicts each patch as one color, the mean of visible patches with weights exp(-d^2 / 2).

    A patch without any valid value in a channel does not count in that channel. Each image needs a visible patch.
    """
    values = patchify_bands(images, encoder.patch_size)  # (B, N, P*P, C)
    distances = squared_distances(encoder.grid_size, images.device)  # (N, N)
    # A softmax stays finite even if all visible patches are far and every weight rounds to 0.
    weights = (-distances / 2).masked_fill(mask[:, None, :].bool(), -torch.inf).softmax(dim=-1)
    with torch.autocast(images.device.type, enabled=False):
        if valid is None:
            colors = weights @ values.mean(dim=-2)  # (B, N, N) @ (B, N, C)
        else:
            count = valid.unflatten(-1, (-1, encoder.in_chans)).sum(dim=-2)  # (B, N, C)
            known = count > 0
            # If all patches have a color, the sums are 1 apart from rounding.
            sums = (weights @ known.float()).masked_fill(known.all(dim=1, keepdim=True), 1.0)
            colors = weights @ (values.sum(dim=-2) / count.clamp(min=1))
            colors = colors / sums.clamp(min=torch.finfo(sums.dtype).tiny)
    return colors.repeat(1, 1, encoder.patch_size**2)  # (B, N, P*P*C)


def error_sums(
    objective: Objective,
    images: Tensor,
    predictions: tuple[Tensor, Tensor],
    mask: Tensor,
    valid: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums squared errors over masked patches, in 0..1 pixels, for a prediction and a baseline.

    `masked` counts masked patches; `measured` weights each by its fraction of valid values.
    """
    p = objective.encoder.patch_size
    original = patchify(images, p)  # (B, N, P*P*C)
    pixel_std = objective.std.flatten().repeat(p * p)  # (P*P*C,)

    def total(pixels: Tensor) -> Tensor:
        errors = ((pixels.float() - original) * pixel_std).square()
        return ((errors if valid is None else errors * valid).mean(dim=-1) * mask).sum()

    return {
        "masked": mask.sum(),
        "measured": mask.sum() if valid is None else (valid.float().mean(dim=-1) * mask).sum(),
        "squared_error": total(predictions[0]),
        "squared_error_baseline": total(predictions[1]),
    }


def psnr_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Computes PSNR on masked patches in dB, the baseline's PSNR, and the gain, from `error_sums`.

    Returns an empty dictionary if no value was masked, or all masked values are missing. With few images this
    happens if every corrupted patch kept its embedding or got another patch's.
    """
    if not sums["measured"]:
        return {}
    psnr, baseline = (
        # Constant images may be reconstructed exactly: the floor limits PSNR to 120 dB.
        -10 * math.log10(max(sums[name] / sums["measured"], 1e-12))
        for name in ("squared_error", "squared_error_baseline")
    )
    return {"psnr_db": psnr, "psnr_baseline_db": baseline, "psnr_gain_db": psnr - baseline}


def reconstruction_pictures(
    objective: Objective, original: Tensor, predicted: Tensor, mask: Tensor, label: str = "predicted"
) -> list[Picture]:
    """Shows masked, predicted, pasted and original, from raw values and normalized predictions (B, N, P*P*C)."""
    shown = unpatchify(predicted.float(), objective.encoder.patch_size, objective.encoder.img_size)
    pixels = (shown * objective.std + objective.mean).clamp(0, 1)
    return masked_pictures(objective, original, pixels, mask, label=label)


def masked_pictures(
    objective: Objective, original: Tensor, predicted: Tensor, mask: Tensor, *, label: str
) -> list[Picture]:
    """Shows masked, predicted, pasted and original, from raw values and predicted pixels (B, C, H, W) in 0..1."""
    p, img_size = objective.encoder.patch_size, objective.encoder.img_size
    masked = unpatchify(mask[..., None].expand(-1, -1, p * p), p, img_size)  # (B, 1, H, W)
    pixels = objective.unit(original)
    return [
        Picture("masked", pixels * (1 - masked) + 0.5 * masked),
        Picture(label, predicted),
        Picture("pasted", pixels * (1 - masked) + predicted * masked),
        Picture("original", pixels),
    ]
