"""Derives steps, batches and rates from the config. Every duration becomes steps here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel

from mae_vit.config.data import fitting_lanes, lanes_fit
from mae_vit.config.schema import Config, TrainSection
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.core.urls import redact_url


class Due(NamedTuple):
    """What happens after a step."""

    log: bool
    evaluate: bool
    probe: bool
    save: bool
    last: bool


@dataclass(frozen=True)
class Plan:
    """Derived values of a run; the config itself never changes.

    Attributes:
        num_samples: images that are trained on.
        steps_per_epoch: whole effective batches in an epoch; the rest is dropped.
        total_steps: optimizer steps of the run.
        warmup_steps: steps of linear warm-up, fewer than `total_steps` (of 2 or more).
        effective_batch_size: images per step over all ranks.
        batch_size_per_device: images per micro-batch of one rank.
        accumulation: micro-batches per step.
        lr: peak learning rate.
        checkpoint_every_steps: steps between saves; time may ask for more (`checkpoint.every_minutes`).
        evaluate_every_steps: steps between evaluations on held-out images.
        probe_every_steps: steps between scores of the online probe; 0 for none.
        notes: where the plan departs from the config, a sentence each.
    """

    num_samples: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    effective_batch_size: int
    batch_size_per_device: int
    accumulation: int
    lr: float
    checkpoint_every_steps: int
    evaluate_every_steps: int
    probe_every_steps: int = 0
    notes: tuple[str, ...] = ()

    def due(self, done: int, *, log_every_steps: int) -> Due:
        """Returns what is due after `done` steps. After the last step, all that the run ever does is due."""
        last = done == self.total_steps

        def every(steps: int) -> bool:
            return steps > 0 and (last or done % steps == 0)

        evaluate, probe = every(self.evaluate_every_steps), every(self.probe_every_steps)
        log = evaluate or probe or done % log_every_steps == 0
        return Due(log, evaluate, probe, every(self.checkpoint_every_steps), last)

    def position(self, step: int) -> tuple[int, int]:
        """Returns (epoch, step within the epoch): the whole state of the data order."""
        return divmod(step, self.steps_per_epoch)


# Training images for each image that the online probe encodes. Encoding costs less than training, so the probe takes
# well under 1 % of the time.
_TRAINED_PER_PROBED = 150
# Upper bound that only a typo exceeds: a step a microsecond for ten days.
_MOST_STEPS = 10**12


def make_plan(config: Config, *, num_samples: int, world_size: int, probe_size: int = 0) -> Plan:
    """Derives a run's numbers from its config, data and ranks.

    Raises:
        InputError: if the batch does not divide over ranks and micro-batches, if these do not hold whole repeats, if
            ranks and lanes do not fit, if the data holds less than one batch, or if the rate would end above its peak.
    """
    train, optim, save, monitor = config.train, config.optim, config.checkpoint, config.monitor
    batch = fit_batch(config, num_samples=num_samples, world_size=world_size)
    notes = []
    if batch < train.effective_batch_size:
        notes.append(
            f"{larger_than_data(config, num_samples)}; using {count_of(batch, 'image')} per batch, the largest "
            "power of two"
        )
    per_device, accumulation = split_batch(config, batch, world_size)
    steps_per_epoch = num_samples // batch

    def to_steps(section: BaseModel, prefix: str) -> int | None:
        """Converts a duration, given one way or not at all, to optimizer steps."""
        steps, epochs, samples = (
            getattr(section, f"{prefix}{unit}", None) for unit in ("steps", "epochs", "samples")
        )
        if epochs is not None:
            return round(epochs * steps_per_epoch)
        # Rounded up: "train on at least this many images".
        return steps if samples is None else -(-samples // batch)

    def every(section: BaseModel, prefix: str, default: int) -> int:
        steps = to_steps(section, prefix)
        return max(1, default if steps is None else steps)

    total = to_steps(train, "") or 0
    if total < 1:
        raise InputError(f"train.epochs={train.epochs} is less than one step of {batch} images; give more")
    if total > _MOST_STEPS:
        raise InputError(f"train: {total:.3g} steps; the limit is {_MOST_STEPS:.0e}")
    warmup = to_steps(train, "warmup_") or 0
    if warmup and warmup >= total:
        # A short trial of a long recipe keeps its shape: warm-up, then decay.
        notes.append(
            f"{_as_given(train, 'warmup_', warmup)} is {'longer than' if warmup > total else 'as long as'} "
            f"{_as_given(train, '', total)}; warming up for a tenth of it, {count_of(total // 10, 'step')}"
        )
        warmup = total // 10
    # The schema requires one of the two.
    lr = optim.lr if optim.lr is not None else (optim.blr or 0.0) * batch / 256
    if optim.min_lr > lr:
        given = f"optim.lr={lr:g}" if optim.lr else f"{lr:g} = optim.blr={optim.blr:g} x {batch} / 256"
        raise InputError(f"optim.min_lr={optim.min_lr:g} is above the peak rate {given}; lower it")
    return Plan(
        num_samples=num_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=warmup,
        effective_batch_size=batch,
        batch_size_per_device=per_device,
        accumulation=accumulation,
        lr=lr,
        checkpoint_every_steps=every(save, "every_", total if save.every_minutes else steps_per_epoch),
        evaluate_every_steps=every(monitor, "evaluate_every_", steps_per_epoch),
        probe_every_steps=-(-_TRAINED_PER_PROBED * probe_size // batch),
        notes=tuple(notes),
    )


def _as_given(train: TrainSection, prefix: str, steps: int) -> str:
    """Names a duration's key and value, and its steps where it was given another way."""
    units = ("steps", "epochs", "samples")
    unit, value = next((u, v) for u in units if (v := getattr(train, prefix + u)) is not None)
    typed = f"{value:g}" if isinstance(value, float) else str(value)
    return f"train.{prefix}{unit}={typed}{'' if unit == 'steps' else f' ({steps} steps)'}"


def check_grouping(plan: Plan, world_size: int, repeats: int, *, unit: int, views: int, why: str) -> None:
    """Checks that a micro-batch has whole groups of `unit` consecutive rows, with `views` of each image.

    A loss takes a group together; `why` is the message's prefix that explains it.

    Raises:
        InputError: naming the nearest sizes that have whole groups.
    """
    if repeats != views:
        raise InputError(
            f"{why}, so each image must come {'once' if views == 1 else f'in {views} views'}; use "
            f"data.repeats={views}, not {repeats}"
        )
    batch, size = plan.effective_batch_size, plan.batch_size_per_device
    if size % unit == 0:
        return
    of_rank = batch // world_size
    if of_rank % unit == 0:
        fitting = [part for part in range(unit, of_rank + 1, unit) if of_rank % part == 0]
        nearest = f"train.batch_size_per_device={min(fitting, key=lambda part: abs(part - size))}"
    else:
        # With several micro-batches, each must hold whole groups.
        part = unit if plan.accumulation == 1 else nearest_multiple(size, unit)
        whole = nearest_multiple(batch, part * world_size)
        nearest = f"train.effective_batch_size={whole}"
        nearest += f" train.batch_size_per_device={part}" * (plan.accumulation > 1)
        if whole > plan.num_samples and views > 1:
            nearest = f"objective.group_size={size // views}"
    raise InputError(f"{why}, so {unit} must divide micro-batches of {size} images (nearest: {nearest})")


def fit_batch(config: Config, *, num_samples: int, world_size: int = 1, shrinks: bool = True) -> int:
    """Returns the effective batch size: the config's, or for smaller data the largest power of two that they hold.

    The result does not depend on the number of ranks.

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
    reason = larger_than_data(config, num_samples) + ("" if shrinks else "; a comparison keeps its batch")
    raise InputError(reason + (f" (nearest: {num_samples // unit * unit})" if num_samples >= unit else ""))


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
            f"train.batch_size_per_device={per_device} does not divide the {of_rank} images of a "
            f"process (nearest: {near})"
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
