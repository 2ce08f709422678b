"""Images as patches, and colors as classes.

Shapes: B batch, C channels, H W pixels, P patch size, N = H*W / P**2 patches (R rows, K columns), M chosen patches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take_tokens(tokens: Tensor, ids: Tensor) -> Tensor:
    """Picks tokens: (B, n, D), int64 (B, m) -> (B, m, D)."""
    return tokens.gather(1, ids[..., None].expand(-1, -1, tokens.shape[-1]))


COLOR_BITS = 3


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images into flattened patches, in raster order: (B, C, H, W) of any dtype -> (B, N, P*P*C).

    The order within a patch is row, column, channel, as in the official MAE code (MAE Sec. 3).
    """
    batch, channels, height, width = images.shape
    p = patch_size
    grid = images.reshape(batch, channels, height // p, p, width // p, p)  # (B, C, R, P, K, P)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, (height // p) * (width // p), p * p * channels)


def patchify_bands(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images into patches, as `patchify`, with an axis of bands: (B, C, H, W) -> (B, N, P*P, C)."""
    return patchify(images, patch_size).unflatten(-1, (-1, images.shape[1]))


def gather_patches(images: Tensor, patch_size: int, ids: Tensor) -> Tensor:
    """Cuts the patches `ids` out of images, in the order of a convolution's weights: channel, row, column.

    (B, C, H, W), int64 (B, M) -> (B, M, C*P*P). It equals `F.unfold` at `ids`, but copies only these patches, in one
    kernel. CUDA's unfold launches one kernel per image (torch 2.15, aten/src/ATen/native/cuda/Im2Col.cu).
    """
    batch, channels, height, width = images.shape
    p, columns = patch_size, width // patch_size
    grid = images.reshape(batch, channels, height // p, p, columns, p)  # (B, C, R, P, K, P)
    image = torch.arange(batch, device=images.device)[:, None]  # (B, 1)
    return grid[image, :, ids // columns, :, ids % columns].flatten(2)  # (B, M, C, P, P) -> (B, M, C*P*P)


def unpatchify(patches: Tensor, patch_size: int | tuple[int, int], img_size: tuple[int, int]) -> Tensor:
    """Inverts `patchify`, for patches of any height and width too: (B, N, P*P*C) -> (B, C, H, W)."""
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    rows, columns = img_size[0] // height, img_size[1] // width
    grid = patches.reshape(patches.shape[0], rows, columns, height, width, -1)  # (B, R, K, P, P, C)
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(patches.shape[0], -1, rows * height, columns * width)


def mean_color_bins(images: Tensor, patch_size: int) -> Tensor:
    """Quantizes the mean of each channel of each patch to 3 bits (ViT App. B.1.2).

    uint8 (B, C, H, W), raw 0..255 -> int64 (B, N, C) in [0, 8): min(7, floor(mean / 32)). Computed in integers, so it
    is exact on any device.
    """
    sums = patchify_bands(images, patch_size).sum(dim=2, dtype=torch.int64)  # (B, N, C)
    return (sums // (patch_size**2 * 32)).clamp_(max=2**COLOR_BITS - 1)


def mean_band_bins(
    images: Tensor, patch_size: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Quantizes the mean of each band of each patch to 3 bits, as `mean_color_bins` does for 8-bit images.

    Images are float32 (B, C, H, W), 0..1, missing values 0; values outside go into the first or last bin. `valid`, bool
    (B, C, H, W), is true where a value is present; None if none is missing. Returns int64 (B, N, C) in [0, 8); and bool
    (B, N, C), false if a patch has no valid value of a band, or None without `valid`.
    """
    # In float64 all devices put a mean on the same side of a bin's edge, apart from ties.
    sums = patchify_bands(images, patch_size).sum(dim=2, dtype=torch.float64)  # (B, N, C)
    count = None if valid is None else patchify_bands(valid, patch_size).sum(dim=2)  # (B, N, C)
    means = sums / (patch_size * patch_size if count is None else count.clamp(min=1))
    bins = (means * 2**COLOR_BITS).floor().clamp(0, 2**COLOR_BITS - 1).long()
    return bins, None if count is None else count > 0


def join_bins(bins: Tensor) -> Tensor:
    """Joins the bins of a color's channels into one class, 64 R + 8 G + B: (..., C) -> (...) in [0, 8**C)."""
    return (bins * _class_weights(bins.shape[-1], bins.device)).sum(dim=-1)


def _class_weights(channels: int, device: torch.device) -> Tensor:
    """Computes 64, 8, 1 for three channels, on the device, because a copy from the host would block."""
    return 2 ** (COLOR_BITS * torch.arange(channels - 1, -1, -1, device=device))


def split_bins(classes: Tensor, channels: int) -> Tensor:
    """Inverts `join_bins`: int64 (...) -> (..., C)."""
    return (classes[..., None] // _class_weights(channels, classes.device)) % 2**COLOR_BITS
