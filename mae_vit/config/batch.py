"""The effective batch: what fits the data, and its parts over ranks and micro-batches."""

from __future__ import annotations

import math

from mae_vit.config.data import fitting_lanes, lanes_fit
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url


def fit_batch(config: Config, *, num_samples: int, world_size: int = 1) -> int:
    """Returns the effective batch size: the config's, or what fits data that are smaller.

    That is the largest power of two that the data hold, whatever the number of ranks: the same on all of them.

    Args:
        config: of the run.
        num_samples: images that are trained on.
        world_size: ranks, for the message.

    Raises:
        InputError: if the data hold less than one batch, and the parts of a smaller one would not fit.
    """
    batch, data = config.train.effective_batch_size, config.data
    if batch <= num_samples:
        return batch
    shrunk = 1 << max(0, num_samples.bit_length() - 1)
    if num_samples and shrunk % (data.repeats * (data.lanes or 1)) == 0:
        return shrunk
    raise InputError(larger_than_data(config, num_samples) + _nearest(config, num_samples, world_size))


def check_same_batch(config: Config, *, num_samples: int, world_size: int = 1) -> None:
    """Makes sure that the batch need not shrink: rows of a comparison are trained by the batch that it gives them.

    Args:
        config: of the run.
        num_samples: images that are trained on.
        world_size: ranks, for the message.

    Raises:
        InputError: if the data hold less than one batch.
    """
    if config.train.effective_batch_size > num_samples:
        near = _nearest(config, num_samples, world_size)
        raise InputError(f"{larger_than_data(config, num_samples)}; a comparison changes no batch{near}")


def _nearest(config: Config, num_samples: int, world_size: int) -> str:
    unit = math.lcm(config.data.repeats * (config.data.lanes or 1), world_size)
    nearest = num_samples // unit * unit
    return f" (nearest: {nearest})" if nearest else ""


def larger_than_data(config: Config, num_samples: int) -> str:
    """Says so, with both sizes."""
    return (
        f"train.effective_batch_size={config.train.effective_batch_size} is larger than the data: split "
        f'"{config.data.split}" of {redact_url(config.data.path)} has {num_samples} images to train on'
    )


def check_lanes(lanes: int | None, batch: int, world_size: int) -> None:
    """Makes sure that lanes and ranks divide one another.

    Raises:
        InputError: with the nearest numbers.
    """
    if lanes is None or lanes_fit(lanes, world_size):
        return
    ranks = max(number for number in range(1, world_size) if lanes_fit(lanes, number) and batch % number == 0)
    raise InputError(
        f"data.lanes={lanes} does not fit {world_size} ranks: one must divide the other "
        f"(nearest lanes: {fitting_lanes(lanes, batch, world_size)}, or use {ranks} ranks)"
    )


def split_batch(batch: int, per_device: int | None, world_size: int) -> tuple[int, int]:
    """Returns (images per micro-batch of a rank, micro-batches per step).

    Raises:
        InputError: if they do not divide the batch, with the nearest sizes.
    """
    if batch % world_size:
        near = max(1, round(batch / world_size)) * world_size
        raise InputError(
            f"train.effective_batch_size={batch} does not divide over {world_size} ranks (nearest: {near})"
        )
    share = batch // world_size
    if per_device is None or per_device >= share:
        return share, 1
    if share % per_device:
        near = max(d for d in range(1, per_device + 1) if share % d == 0)
        raise InputError(
            f"train.batch_size_per_device={per_device} does not divide the {share} images of each of "
            f"{world_size} ranks (nearest: {near})"
        )
    return per_device, share // per_device


def check_repeats(repeats: int, batch: int, micro_batch: int, parts: int) -> None:
    """Makes sure that micro-batches hold whole repeats: all views of an image are computed where it is decoded.

    Raises:
        InputError: with the nearest sizes.
    """
    if micro_batch % repeats:
        unit = repeats * parts
        raise InputError(
            f"data.repeats={repeats} does not divide micro-batches of {micro_batch} images (nearest: "
            f"train.effective_batch_size={max(1, round(batch / unit)) * unit}, or another train.batch_size_per_device)"
        )
