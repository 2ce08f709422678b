"""Missing values of images: how losses and averages leave them out.

Masks of valid values are bool; true means that the value is there. None in place of a mask means that none is
missing. Then, and where a mask is true everywhere, results are those without masks, to the bit.
Shapes: B batch, C channels, N patches, M patches that a loss looks at, V = P*P*C values of a patch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Added to each patch's variance under norm_pix_loss, as in the official code.
TARGET_VARIANCE_EPS = 1e-6


def weigh(errors: Tensor, valid: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """Multiplies errors by weights: 0 for missing values; the others of an image share what these leave.

    Each image has the same sum of weights, however many values it misses. So the mean over any split of a batch
    equals that over the whole batch. An image without any valid value has no loss.

    Args:
        errors: float32 (B, M, V).
        valid: bool (B, M, V), or None.
        mask: (B, M), 1 = counted by the caller; all by default.
    """
    if valid is None:
        return errors
    counted = valid if mask is None else valid & (mask > 0)[..., None]
    total = valid[0].numel() if mask is None else (mask > 0).sum(dim=1) * valid.shape[-1]  # values, or (B,)
    share = total / counted.sum(dim=(1, 2)).clamp(min=1)  # (B,)
    return errors * (valid * share[:, None, None])


def standardize_patches(patches: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes each patch by its own mean and unbiased variance (MAE Sec. 4.1), both of its valid values.

    Args:
        patches: (B, N, V), 0 where a value is missing.
        valid: bool (B, N, V), or None.

    Returns:
        Normalized patches (B, N, V), 0 where a value is missing; mean and scale (B, N, 1), which undo it.
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


def patch_colors(patches: Tensor, valid: Tensor | None, channels: int) -> tuple[Tensor, Tensor | None]:
    """Averages each channel of patches of values that are 0 where missing.

    Args:
        patches: (B, N, V), each patch ordered row, column, channel.
        valid: bool (B, N, V), or None.
        channels: C.

    Returns:
        Means (B, N, C), and bool (B, N, C), false where a patch has no value of a channel; None without `valid`.
    """
    by_channel = patches.unflatten(-1, (-1, channels))  # (B, N, P*P, C)
    if valid is None:
        return by_channel.mean(dim=-2), None
    count = valid.unflatten(-1, (-1, channels)).sum(dim=-2)  # (B, N, C)
    return by_channel.sum(dim=-2) / count.clamp(min=1), count > 0


def valid_share(valid: Tensor | None, mask: Tensor) -> Tensor:
    """Counts masked patches by their share of valid values: (B, N, V), (B, N) -> scalar."""
    return mask.sum() if valid is None else (valid.float().mean(dim=-1) * mask).sum()


def spread_known(weights: Tensor, colors: Tensor, known: Tensor | None) -> Tensor:
    """Averages colors by weights, over the patches that have one.

    Args:
        weights: (B, N, N), rows of sum 1.
        colors: (B, N, C), 0 where there is none.
        known: bool (B, N, C), or None.

    Returns:
        (B, N, C).
    """
    averaged = weights @ colors
    if known is None:
        return averaged
    # Where all patches have a color the rows' sums are 1 but for rounding.
    sums = (weights @ known.float()).masked_fill(known.all(dim=1, keepdim=True), 1.0)
    return averaged / sums.clamp(min=torch.finfo(sums.dtype).tiny)
