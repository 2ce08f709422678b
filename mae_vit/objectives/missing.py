"""Missing values of images: how losses and averages leave them out.

Masks of valid values are bool; true means that the value is there. None in place of a mask means that none is
missing. Then, and where a mask is true everywhere, results are those without masks, to the bit.
Shapes: B batch, C channels, N patches, M patches that a loss looks at, V = P*P*C values of a patch.
"""

from __future__ import annotations

from torch import Tensor

# Added to each patch's variance under norm_pix_loss, as in the official code.
TARGET_VARIANCE_EPS = 1e-6


def weigh(errors: Tensor, valid: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """Multiplies errors (B, M, V) by weights: 0 for missing values; the others of an image share what these leave.

    Each image has the same sum of weights, however many values it misses. So the mean over any split of a batch
    equals that over the whole batch. An image without any valid value has no loss. `mask` (B, M) is 1 where the caller
    counts a patch; all by default.
    """
    if valid is None:
        return errors
    counted = valid if mask is None else valid & (mask > 0)[..., None]
    total = valid[0].numel() if mask is None else (mask > 0).sum(dim=1) * valid.shape[-1]  # values, or (B,)
    share = total / counted.sum(dim=(1, 2)).clamp(min=1)  # (B,)
    return errors * (valid * share[:, None, None])


def standardize_patches(patches: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes each patch (B, N, V) by its own mean and unbiased variance (MAE Sec. 4.1), of its valid values.

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
