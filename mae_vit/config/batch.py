"""Fits the effective batch to the data, and splits it over ranks and micro-batches."""

from __future__ import annotations

import math

from mae_vit.config.data import fitting_lanes, lanes_fit
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url


def fit_batch(config: Config, *, num_samples: int, world_size: int = 1, shrinks: bool = True) -> int:
    """Returns the effective batch size: the config's, or for smaller data the largest power of two that they hold.

    The result does not depend on the number of ranks.

    Args:
        config: config of the run.
        num_samples: images that are trained on.
        world_size: number of ranks, for the message.
        shrinks: False refuses a smaller batch: rows of a comparison must keep the batch that it gives them.

    Raises:
        InputError: if the data hold less than one batch, and it must not shrink or repeats and lanes do not divide it.
    """
    batch, unit = config.train.effective_batch_size, config.data.repeats * (config.data.lanes or 1)
    if batch <= num_samples:
        return batch
    shrunk = 1 << max(0, num_samples.bit_length() - 1)
    if shrinks and num_samples and shrunk % unit == 0:
        return shrunk
    unit = math.lcm(unit, world_size)
    reason = larger_than_data(config, num_samples) + ("" if shrinks else "; a comparison changes no batch")
    raise InputError(reason + (f" (nearest: {num_samples // unit * unit})" if num_samples >= unit else ""))


def check_same_batch(config: Config, *, num_samples: int, world_size: int = 1) -> None:
    """Checks that the batch need not shrink (`fit_batch`)."""
    fit_batch(config, num_samples=num_samples, world_size=world_size, shrinks=False)


def larger_than_data(config: Config, num_samples: int) -> str:
    """Returns the message that the batch is larger than the data, with both sizes."""
    return (
        f"train.effective_batch_size={config.train.effective_batch_size} is larger than the data: split "
        f'"{config.data.split}" of {redact_url(config.data.path)} has {num_samples} images to train on'
    )


def split_batch(config: Config, batch: int, world_size: int) -> tuple[int, int]:
    """Returns (images per micro-batch of a rank, micro-batches per step).

    A micro-batch holds whole repeats: all views of an image are computed where it is decoded. The number of lanes
    divides that of ranks, or the other way round.

    Raises:
        InputError: if something does not divide; names the nearest numbers.
    """
    per_device, lanes, repeats = config.train.batch_size_per_device, config.data.lanes, config.data.repeats
    if batch % world_size:
        raise InputError(
            f"train.effective_batch_size={batch} does not divide over {world_size} ranks "
            f"(nearest: {nearest_multiple(batch, world_size)})"
        )
    of_rank = batch // world_size
    if per_device is None or per_device >= of_rank:
        per_device = of_rank
    if of_rank % per_device:
        near = max(size for size in range(1, per_device + 1) if of_rank % size == 0)
        raise InputError(
            f"train.batch_size_per_device={per_device} does not divide the {of_rank} images of each of "
            f"{world_size} ranks (nearest: {near})"
        )
    if lanes is not None and not lanes_fit(lanes, world_size):
        ranks = max(n for n in range(1, world_size) if lanes_fit(lanes, n) and batch % n == 0)
        raise InputError(
            f"data.lanes={lanes} does not fit {world_size} ranks: one must divide the other "
            f"(nearest lanes: {fitting_lanes(lanes, batch, world_size)}, or use {ranks} ranks)"
        )
    if per_device % repeats:
        near = nearest_multiple(batch, repeats * batch // per_device)
        raise InputError(
            f"data.repeats={repeats} does not divide micro-batches of {per_device} images (nearest: "
            f"train.effective_batch_size={near}, or another train.batch_size_per_device)"
        )
    return per_device, of_rank // per_device


def nearest_multiple(number: int, unit: int) -> int:
    """Returns the positive multiple of `unit` that is nearest to a number."""
    return max(1, round(number / unit)) * unit
