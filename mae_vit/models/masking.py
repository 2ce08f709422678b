"""Chooses the masked patches, as a pure function of (seed, epoch, sample index).

Masks index patches only (0..N-1), never prefix tokens; 1 = masked and counted in the loss, 0 = visible.
Shapes: B images, N patches, N_keep visible patches, M corrupted patches, u mask unit, U = N / u**2 units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mae_vit.core.keyed_rng import RngStream, SampleKeys
from mae_vit.models.sizes import count_units, num_masked_patches

KIND_MASK, KIND_RANDOM, KIND_UNCHANGED = 0, 1, 2
# Shares of corrupted patches that become [mask] and another patch; the others stay (ViT App. B.1.2).
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1


def patch_noise(keys: SampleKeys, num_patches: int) -> Tensor:
    """Draws integers for sorting, int64 (B, N), distinct within a row, so that all devices sort them in the same order.

    Raises ValueError for more than 2**16 patches.
    """
    return _ranked(keys.random_uint32(RngStream.MASK, num_patches))


def _ranked(drawn: Tensor) -> Tensor:
    """Makes 32-bit words (B, N) distinct within a row: the patch number fills the low 16 bits."""
    num_patches = drawn.shape[1]
    if num_patches > 2**16:
        raise ValueError(f"{num_patches} patches: at most {2**16} can be ranked")
    return (drawn << 16) | torch.arange(num_patches, device=drawn.device)


@dataclass(frozen=True)
class Masking:
    """A random mask per image.

    Attributes:
        ids_keep: int64 (B, N_keep), the visible patches in shuffled order.
        ids_masked: int64 (B, N - N_keep), the masked patches in shuffled order.
        ids_restore: int64 (B, N), each patch's position in the shuffled order.
        mask: float32 (B, N), 1 = masked, 0 = visible.
    """

    ids_keep: Tensor
    ids_masked: Tensor
    ids_restore: Tensor
    mask: Tensor


def _keep_first(ids_shuffle: Tensor, num_keep: int, patches: Tensor) -> Masking:
    """Keeps the first patches of a shuffled order (B, N); `patches` are 0 to N - 1."""
    ids_restore = torch.empty_like(ids_shuffle).scatter_(1, ids_shuffle, patches.expand_as(ids_shuffle))
    mask = (ids_restore >= num_keep).float()  # (B, N)
    return Masking(ids_shuffle[:, :num_keep], ids_shuffle[:, num_keep:], ids_restore, mask)


def random_masking(noise: Tensor, mask_ratio: float) -> Masking:
    """Keeps the patches with the lowest noise (B, N), distinct within a row (MAE Sec. 3, "Masking")."""
    num_patches = noise.shape[1]
    num_keep = num_patches - num_masked_patches(num_patches, mask_ratio)
    return _keep_first(noise.argsort(dim=1), num_keep, torch.arange(num_patches, device=noise.device))


def unit_masking(
    keys: SampleKeys, grid_size: tuple[int, int], mask_ratio: float, mask_unit: int = 1
) -> Masking:
    """Masks squares of `mask_unit` x `mask_unit` patches, a fixed number per image, drawn by the keys.

    SimMIM (arXiv 2111.09886, Sec. 3.2) and Pixio (arXiv 2512.15715) mask such squares. The patches of a
    square are consecutive in the shuffled order. A `mask_unit` of 1 masks single patches.
    """
    noise = patch_noise(keys, count_units(grid_size, mask_unit))  # (B, U)
    if mask_unit == 1:
        return random_masking(noise, mask_ratio)
    rows, columns = grid_size
    patches = torch.arange(rows * columns, device=noise.device)
    by_unit = patches.view(rows // mask_unit, mask_unit, columns // mask_unit, mask_unit)
    by_unit = by_unit.transpose(1, 2).reshape(-1, mask_unit**2)  # (U, u*u)
    num_keep = len(by_unit) - num_masked_patches(len(by_unit), mask_ratio)
    return _keep_first(by_unit[noise.argsort(dim=1)].flatten(1), num_keep * mask_unit**2, patches)


@dataclass(frozen=True)
class Corruption:
    """The 80-10-10 corruption of masked patch prediction (ViT App. B.1.2).

    Attributes:
        ids: int64 (B, M), the corrupted patches, ascending.
        kind: int64 (B, M), KIND_MASK, KIND_RANDOM or KIND_UNCHANGED.
        source: int64 (B, M), the other patch whose embedding replaces a KIND_RANDOM patch.
        mask: float32 (B, N), 1 = corrupted and counted in the loss.
    """

    ids: Tensor
    kind: Tensor
    source: Tensor
    mask: Tensor


def corrupt(keys: SampleKeys, num_patches: int, corrupt_ratio: float) -> Corruption:
    """Draws exactly round(corrupt_ratio * N) corrupted patches per image.

    A fixed number per image is our reading of the paper's "50 %". Shapes are static, and each image has the
    same weight however the batch is split over ranks. Each patch's kind depends on its own random number.
    A "random other patch" is another patch of the same image.
    """
    num_corrupted = round(corrupt_ratio * num_patches)
    streams = (RngStream.MASK, RngStream.CORRUPT_KIND, RngStream.CORRUPT_SOURCE)
    order, kinds, sources = keys.random_uint32_of_each(streams, num_patches).unbind(0)  # (B, N) each
    ids = _ranked(order).argsort(dim=1)[:, :num_corrupted].sort(dim=1).values  # (B, M)
    mask = torch.zeros(ids.shape[0], num_patches, device=ids.device).scatter_(1, ids, 1.0)

    drawn = kinds.gather(1, ids)  # (B, M)
    is_mask = drawn < int(_MASK_SHARE * 2**32)
    is_random = ~is_mask & (drawn < int((_MASK_SHARE + _RANDOM_SHARE) * 2**32))
    kind = torch.full_like(ids, KIND_UNCHANGED)
    kind = kind.masked_fill(is_mask, KIND_MASK).masked_fill(is_random, KIND_RANDOM)

    # Multiply-and-shift maps a 32-bit word to 0..N-2. A step of 1..N-1 (modulo N) never ends at the patch itself.
    drawn = sources.gather(1, ids)  # (B, M)
    step = 1 + ((drawn * (num_patches - 1)) >> 32)
    return Corruption(ids, kind, (ids + step) % num_patches, mask)


def nearest_visible(mask: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Finds the nearest visible patch of each patch (for a visible patch itself): (B, N) -> int64 (B, N) patch numbers.

    Each row needs a visible patch. Of equally near patches it takes the lowest number.
    """
    weights = squared_distances(grid_size, mask.device)  # (N, N)
    blocked = mask[:, None, :].bool()  # (B, 1, N)
    return weights[None].masked_fill(blocked, torch.inf).argmin(dim=-1)  # (B, N, N) -> (B, N)


def squared_distances(grid_size: tuple[int, int], device: torch.device) -> Tensor:
    """Returns the squared distance in patches between all pairs, float32 (N, N)."""
    rows = torch.arange(grid_size[0], device=device, dtype=torch.float32)
    columns = torch.arange(grid_size[1], device=device, dtype=torch.float32)
    places = torch.cartesian_prod(rows, columns)  # (N, 2)
    return (places[:, None] - places[None]).square().sum(dim=-1)
