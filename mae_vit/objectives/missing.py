"""Leaves missing values of images out of losses and averages.

Masks of valid values are bool, true = present; None means that no value is missing. With None, or a mask that is true
everywhere, results equal those without masks to the bit.
Shapes: B batch, C channels, N patches, M patches in the loss, V = P*P*C values of a patch.
"""

from __future__ import annotations

from torch import Tensor

# Added to each patch's variance under norm_pix_loss, as in the official code.
TARGET_VARIANCE_EPS = 1e-6


def weigh(errors: Tensor, valid: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """Multiplies errors (B, M, V) by weights: 0 for missing values, and equal weights for an image's other values.

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
    """Normalizes each patch (B, N, V) by mean and unbiased variance of its valid values (MAE Sec. 4.1).

    Returns:
        Normalized patches, 0 where a value is missing; mean and scale (B, N, 1), which undo it.
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
