"""What follows from the config: steps, batches and rates. Every duration becomes steps here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mae_vit.config.batch import check_lanes, check_repeats, fit_batch, larger_than_data, split_batch
from mae_vit.config.schema import Config, TrainSection
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of


class Due(NamedTuple):
    """What happens after a step.

    Attributes:
        log: a line of metrics; with each of the three below, too.
        evaluate: held-out images are measured.
        probe: the online probe scores the features.
        inspect: views of the encoder are drawn.
        save: a checkpoint is saved.
        last: the run is over.
    """

    log: bool
    evaluate: bool
    probe: bool
    inspect: bool
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
        inspect_every_steps: steps between views of the encoder; 0 for none.
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
    inspect_every_steps: int = 0
    notes: tuple[str, ...] = ()

    def due(self, done: int, *, log_every_steps: int) -> Due:
        """What is due once `done` steps are; the last step is due for all that the run does at all."""
        last = done == self.total_steps

        def every(steps: int) -> bool:
            return steps > 0 and (last or done % steps == 0)

        evaluate, probe, inspect = map(
            every, (self.evaluate_every_steps, self.probe_every_steps, self.inspect_every_steps)
        )
        log = evaluate or probe or inspect or done % log_every_steps == 0
        return Due(log, evaluate, probe, inspect, every(self.checkpoint_every_steps), last)

    def position(self, step: int) -> tuple[int, int]:
        """Returns (epoch, step within the epoch): the whole state of the data order."""
        return divmod(step, self.steps_per_epoch)


def to_steps(
    *,
    steps: int | None = None,
    epochs: float | None = None,
    samples: int | None = None,
    steps_per_epoch: int,
    effective_batch_size: int,
    default: int = 0,
) -> int:
    """Converts a duration, given one way or not at all, to optimizer steps."""
    if steps is not None:
        return steps
    if epochs is not None:
        return round(epochs * steps_per_epoch)
    if samples is not None:
        # Rounded up: "train on at least this many images".
        return -(-samples // effective_batch_size)
    return default


# Images trained on for each image that the online probe encodes. An encoded image costs
# less than one that is trained on, so the probe takes well under 1 % of the time.
_TRAINED_PER_PROBED = 150
# A step a microsecond for ten days; beyond lie slips of the keyboard.
_MOST_STEPS = 10**12


def make_plan(config: Config, *, num_samples: int, world_size: int, probe_size: int = 0) -> Plan:
    """Derives a run's numbers from its config, data and ranks.

    Args:
        config: of the run.
        num_samples: images that are trained on.
        world_size: ranks.
        probe_size: images of the online probe; 0 where there is none.

    Raises:
        InputError: if the batch does not divide over ranks and micro-batches, if these do not
            hold whole repeats, if ranks and lanes do not fit, if the data holds less than one batch, or if the rate
            would end above its peak.
    """
    train, optim = config.train, config.optim
    batch = fit_batch(config, num_samples=num_samples, world_size=world_size)
    notes = []
    if batch < train.effective_batch_size:
        notes.append(
            f"{larger_than_data(config, num_samples)}: a batch is {count_of(batch, 'image')}, the largest power of two"
        )
    per_device, accumulation = split_batch(batch, train.batch_size_per_device, world_size)
    check_lanes(config.data.lanes, batch, world_size)
    check_repeats(config.data.repeats, batch, per_device, world_size * accumulation)
    steps_per_epoch = num_samples // batch
    sizes = {"steps_per_epoch": steps_per_epoch, "effective_batch_size": batch}
    total = to_steps(steps=train.steps, epochs=train.epochs, samples=train.samples, **sizes)
    if total < 1:
        raise InputError(f"train.epochs={train.epochs} is less than one step of {batch} images")
    if total > _MOST_STEPS:
        raise InputError(f"train: {total:.3g} steps are more than any run takes (at most {_MOST_STEPS:.0e})")
    warmup = to_steps(
        steps=train.warmup_steps, epochs=train.warmup_epochs, samples=train.warmup_samples, **sizes
    )
    if warmup and warmup >= total:
        # A short try of a long recipe keeps its shape: warm-up, then decay.
        notes.append(_short_warmup(train, warmup, total))
        warmup = total // 10
    lr = _peak_rate(optim.lr, optim.blr, batch)
    if optim.min_lr > lr:
        given = f"optim.lr={lr:g}" if optim.lr else f"{lr:g} = optim.blr={optim.blr:g} x {batch} / 256"
        raise InputError(f"optim.min_lr={optim.min_lr:g} is above the peak rate {given}")
    save, monitor = config.checkpoint, config.monitor

    def every(default: int, steps: int | None, epochs: float | None) -> int:
        return max(1, to_steps(steps=steps, epochs=epochs, default=default, **sizes))

    probe_default = -(-_TRAINED_PER_PROBED * probe_size // batch)
    return Plan(
        num_samples=num_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=warmup,
        effective_batch_size=batch,
        batch_size_per_device=per_device,
        accumulation=accumulation,
        lr=lr,
        checkpoint_every_steps=every(
            total if save.every_minutes else steps_per_epoch, save.every_steps, save.every_epochs
        ),
        evaluate_every_steps=every(
            steps_per_epoch, monitor.evaluate_every_steps, monitor.evaluate_every_epochs
        ),
        probe_every_steps=every(probe_default, monitor.probe_every_steps, monitor.probe_every_epochs)
        if probe_size
        else 0,
        inspect_every_steps=every(0, None, monitor.inspect_every_epochs)
        if monitor.inspect_every_epochs
        else 0,
        notes=tuple(notes),
    )


def _short_warmup(train: TrainSection, warmup: int, total: int) -> str:
    return (
        f"{_as_given(train, 'warmup_', warmup)} is {'longer than' if warmup > total else 'as long as'} "
        f"{_as_given(train, '', total)}: warm-up is a tenth of the run, {count_of(total // 10, 'step')}"
    )


def _as_given(train: TrainSection, prefix: str, steps: int) -> str:
    """Names a duration's key and value, and its steps where it was given another way."""
    for unit in ("steps", "epochs", "samples"):
        value = getattr(train, prefix + unit)
        if value is not None:
            typed = f"{value:g}" if isinstance(value, float) else str(value)
            return f"train.{prefix}{unit}={typed}{'' if unit == 'steps' else f' ({steps} steps)'}"
    raise AssertionError("the schema asks for one")


def _peak_rate(lr: float | None, blr: float | None, effective_batch_size: int) -> float:
    if lr is not None:
        return lr
    assert blr is not None  # the schema asks for one of the two
    return blr * effective_batch_size / 256


def check_grouping(plan: Plan, world_size: int, repeats: int, *, unit: int, views: int, why: str) -> None:
    """Makes sure that rows of the global order that a loss takes together meet in one micro-batch.

    Args:
        plan: of the run.
        world_size: ranks.
        repeats: views of each image in a row (`data.repeats`).
        unit: consecutive rows that belong together.
        views: of each image that they hold.
        why: they belong together, for people.

    Raises:
        InputError: naming the nearest sizes that hold whole units.
    """
    if repeats != views:
        raise InputError(
            f"{why}: each image comes {'once' if views == 1 else f'in {views} views'}, and data.repeats={repeats} "
            f"(use data.repeats={views})"
        )
    size = plan.batch_size_per_device
    if size % unit:
        share = plan.effective_batch_size // world_size
        if share % unit == 0:
            fitting = [part for part in range(unit, share + 1, unit) if share % part == 0]
            nearest = f"train.batch_size_per_device={min(fitting, key=lambda part: abs(part - size))}"
        else:
            # Of several micro-batches, each is made whole.
            part = max(1, round(size / unit)) * unit
            whole = (unit if plan.accumulation == 1 else part) * world_size
            nearest = f"train.effective_batch_size={max(1, round(plan.effective_batch_size / whole)) * whole}"
            nearest += f" train.batch_size_per_device={part}" if plan.accumulation > 1 else ""
        raise InputError(
            f"{why}: micro-batches of {size} images are no whole groups of {unit} (nearest: {nearest})"
        )
