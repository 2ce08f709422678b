"""Formats the parts of the plan that pretraining and fine-tuning share."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.files import nearest_existing
from mae_vit.core.messages import count_of, format_duration
from mae_vit.data.batches.on_device import Place
from mae_vit.runtime.ranks import Ranks, choose_threads
from mae_vit.training.engines.compiling import choose_compiling
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.setup import TrainingSetup
from mae_vit.training.step_time import StepTime

_YEAR_S = 365 * 86400


def describe_augment(config: Config, place: Place) -> str:
    """Describes the augmentation of training images, and the place where it is computed."""
    augment = config.data.augment
    parts = [f"crop {augment.crop}", *(["flip"] if augment.flip else [])]
    if config.data.repeats > 1:
        parts.insert(0, f"{config.data.repeats} of each image")
    if augment.policy != "none":
        parts.append(augment.policy)
    if augment.erasing:
        parts.append(f"a box of {augment.erasing:.0%} of them erased")
    where = f"; on the {'device' if place.on_device else 'host'} ({place.why})" if place.why else ""
    return ", ".join(parts) + where


def plan_lines(facts: Mapping[str, str], notes: Iterable[str], warnings: Iterable[str]) -> str:
    """Returns the lines of a plan."""
    lines = [f"{name:<12}{text}" for name, text in facts.items()]
    lines += [f"note: {text}" for text in notes]
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings)])


def print_notes(notes: Iterable[str]) -> None:
    """Prints notes, such as where a run departs from its config."""
    for note in notes:
        print(f"note: {note}")


def describe_training(setup: TrainingSetup, folder: Path, precision: Chosen, time: str) -> dict[str, str]:
    """Describes length, batch, memory and disk space of a run, and its `time` if it is known: title -> line."""
    config, plan, ranks, device = setup.config, setup.plan, setup.ranks, setup.device
    optim, train, costs = config.optim, config.train, setup.costs
    memory = costs.memory_gib(world_size=ranks.world_size, zero_stage=train.zero_stage)
    kept, disk = retention(config, plan, costs)
    minutes, saves = config.checkpoint.every_minutes, times(plan.checkpoint_every_steps, plan)
    if minutes is not None:
        saves = f"every {minutes:g} min{' and' if saves == 'at the end' else ','} {saves}"
    threads = "" if device.type == "cuda" else ", threads {} ({})".format(*choose_threads(ranks))
    free = shutil.disk_usage(nearest_existing(folder)).free
    rest = plan.num_samples % plan.effective_batch_size
    skipped = f"; each epoch skips a random {count_of(rest, 'image')}, too few for a batch" * (rest > 0)
    return {
        "batch": f"{plan.effective_batch_size:,} = {count_of(ranks.world_size, 'rank')} x "
        f"{count_of(plan.accumulation, 'micro-batch', 'micro-batches')} x {plan.batch_size_per_device}",
        "length": f"{count_of(plan.total_steps, 'step')} = {plan.total_steps / plan.steps_per_epoch:,.2f} epochs of "
        f"{count_of(plan.steps_per_epoch, 'step')}{skipped}",
        "lr": f"{plan.lr:.3e} at most, after {count_of(plan.warmup_steps, 'step')} of warm-up; cosine to "
        f"{optim.min_lr:g}; {optim.name}",
        **({"time": time} if time else {}),
        "engine": f"{describe_engine(config, ranks)}, {device}{threads}",
        "precision": str(precision),
        "compiled": str(choose_compiling(config, plan, device, costs)),
        # 1 GiB: resident memory of a run of the smallest network, measured once by hand.
        "memory": f"about {memory:.2f} GiB for each rank (weights, gradients, moments and float32 activations), "
        "plus torch and other libraries (about 1 GiB on a CPU)",
        "disk": f"{disk / 2**20:,.0f} MiB for at most {count_of(kept, 'checkpoint')} of "
        f"{costs.checkpoint_bytes / 2**20:,.1f} MiB, saved "
        f"{saves}; free: {free / 2**30:,.0f} GiB",
    }


def describe_engine(config: Config, ranks: Ranks) -> str:
    """Names the run's engine and the reason for it."""
    train, several = config.train, ranks.world_size > 1
    engine = train.engine_on(ranks)
    if engine == "deepspeed":
        description = f"deepspeed, ZeRO {train.zero_stage}"
        why = f"zero_stage={train.zero_stage}" if train.zero_stage else "the deepspeed launcher"
    else:
        description = "torch, DistributedDataParallel" if several else "torch"
        why = "several processes of torchrun or srun" if several else "one process"
    return f"{description} ({f'auto: {why}' if train.engine == 'auto' else f'train.engine={engine}'})"


def describe_time(plan: Plan, ranks: Ranks, step_time: StepTime | None, *, done: int = 0) -> str:
    """Words an estimate of the time left after `done` steps; None means that the network is too large to try."""
    if step_time is None:
        return "not estimated: the network is too large to try on this device"
    least, most = ((plan.total_steps - done) * seconds for seconds in step_time[:2])
    if most > _YEAR_S:
        return "over a year on this device; use --dry-run where the run will train"
    apart = "" if ranks.world_size == 1 else "communication of ranks, "
    without = f"without {apart}start-up, evaluation and saves"
    of = count_of(step_time.images, "image")
    return (
        f"{format_duration(least)} to {format_duration(most)}, from {count_of(step_time.tries, 'step')} of {of} timed "
        f"here just now, not compiled; {without}"
    )


def retention(config: Config, plan: Plan, costs: Estimate) -> tuple[int, int]:
    """Returns the largest number of checkpoints on disk, and the approximate bytes of all that the run writes."""
    written = 1 + -(-plan.total_steps // plan.checkpoint_every_steps)  # including step 0
    kept = config.checkpoint.keep_last + 1
    if config.checkpoint.every_minutes is None:
        kept = min(kept, written)
    if config.checkpoint.keep_every:
        kept += plan.total_steps // (plan.checkpoint_every_steps * config.checkpoint.keep_every)
    return kept, kept * costs.checkpoint_bytes + 4 * costs.encoder_parameters


def times(every_steps: int, plan: Plan) -> str:
    """Says how often something happens that also happens at the end of every run."""
    if every_steps >= plan.total_steps:
        return "at the end"
    return "every step" if every_steps == 1 else f"every {every_steps:,} steps and at the end"
