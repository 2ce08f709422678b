"""Checks a config, its data and the machine before a run: `--dry-run` and `mae-vit doctor`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mae_vit.config.command_line import ResumeMode
from mae_vit.config.load import load_config
from mae_vit.core.errors import FetchUnavailable, InputError, damage_allowed
from mae_vit.core.messages import count_of
from mae_vit.data.batches.sources import decode_sample
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import Data
from mae_vit.pretraining.doctor.find_batch import Trial, best_of, find_batch
from mae_vit.pretraining.doctor.machine_checks import (
    Check,
    Status,
    check_devices,
    check_disk,
    check_locks,
    check_memory,
    check_software,
    check_workers,
)
from mae_vit.pretraining.doctor.rank_checks import check_exchange, check_versions, join_ranks, merge_checks
from mae_vit.pretraining.plan_text import describe_plan, order_warnings
from mae_vit.pretraining.setup import Setup, initialize, least_kept, set_up
from mae_vit.runtime.collectives import gather_objects
from mae_vit.runtime.device import find_device
from mae_vit.runtime.exit_codes import EXIT_FAILED
from mae_vit.runtime.failures import run_to_exit_code
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.training.checkpoints.resume import run_identity
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.outputs.plan_text import retention
from mae_vit.training.startup import agree_on_precision, foresee_start, open_run_folder, settle_precision

_READ_SAMPLES = 64


def doctor(path: Path | None, overrides: Sequence[str], *, tries_batches: bool = False) -> int:
    """Checks everything that a run needs and prints what it finds; returns the exit code.

    Under a launcher all ranks check, and rank 0 prints.

    Args:
        path: of the config; None checks only what every run needs.
        overrides: `key.path=value`.
        tries_batches: train a few steps with micro-batches of growing size.

    Returns:
        0, 1 if a check fails, 2 for bad input; else as jobs end.
    """

    def job() -> int:
        if path is None and (overrides or tries_batches):
            raise InputError(f"{overrides[0] if overrides else '--find-batch'} needs --config FILE")
        config = load_config(PretrainConfig, path, overrides) if path is not None else None
        return check_all(config, find_ranks(), tries_batches=tries_batches)

    return run_to_exit_code(job)


def check_all(
    config: PretrainConfig | None,
    ranks: Ranks,
    *,
    resume: ResumeMode = "auto",
    extend: bool = False,
    tries_batches: bool = False,
) -> int:
    """Prints the plan of a run and all checks, trains nothing; collective.

    Returns:
        0, or 1 if a check fails.

    Raises:
        InputError: if the run cannot be set up; of several ranks, after what each of them found was printed.
    """
    if tries_batches and ranks.world_size > 1:
        raise InputError("--find-batch tries on one process: without a launcher")
    device = _device_of(ranks, config.run.device if config else "auto")
    met = join_ranks(ranks, device)
    if met.status != "ok":
        # Ranks that cannot meet print for themselves.
        print(met, flush=True)
        return EXIT_FAILED
    asked = config.train.precision if config else "auto"
    chosen = agree_on_precision(asked, device or torch.device("cpu"), ranks)
    result = (
        examine(config, ranks, resume, chosen, extend=extend) if config else examine_machine(ranks, chosen)
    )
    if result.error is not None and ranks.world_size == 1:
        raise result.error
    checks = [*result.checks, met, check_versions(ranks)]
    if all(gather_objects(result.device is not None, ranks)):
        assert result.device is not None
        checks.append(check_exchange(ranks, result.device))
    checks = merge_checks(checks, ranks)
    if ranks.rank == 0:
        print(result.plan + "\n".join(map(str, checks)), flush=True)
    failed = any(check.status == "FAIL" for check in checks)
    if tries_batches and result.setup is not None and not failed:
        checks.append(try_batches(result.setup))
    if ranks.rank == 0:
        _print_outcome(checks, of_run=config is not None)
    if result.error is not None:
        raise result.error
    return EXIT_FAILED if any(check.status == "FAIL" for check in checks) else 0


def _print_outcome(checks: Sequence[Check], *, of_run: bool) -> None:
    failures, warnings = (sum(check.status == status for check in checks) for status in ("FAIL", "warn"))
    counts = f"{count_of(failures, 'check')} failed, {count_of(warnings, 'warning')}"
    print(f"{counts if failures or warnings else 'all checks passed'}; nothing was trained")
    if not of_run:
        print(
            "not checked: data, workers, memory, disk and locks. They depend on the run: give --config FILE"
        )


@dataclass(frozen=True)
class Examined:
    """The checks of one rank.

    Attributes:
        checks: in the order in which they are printed.
        device: None if this rank has none.
        setup: None without a config, or if the run cannot be set up.
        plan: text; empty where there is no setup.
        error: why the run cannot be set up.
    """

    checks: list[Check]
    device: torch.device | None
    setup: Setup | None = None
    plan: str = ""
    error: Exception | None = None


def _device_of(ranks: Ranks, asked: str) -> torch.device | None:
    try:
        return find_device(ranks, asked)
    except InputError:
        return None  # the checks say why


def examine_machine(ranks: Ranks, precision: Chosen) -> Examined:
    """Checks that do not depend on a run."""
    checks = check_software(compiles=False, deepspeed=True)
    try:
        device = find_device(ranks)
    except InputError as error:
        return Examined([*checks, Check("FAIL", "device", str(error))], None)
    return Examined([*checks, *check_devices(ranks, device, precision)], device)


def examine(
    config: PretrainConfig, ranks: Ranks, resume: ResumeMode, chosen: Chosen, *, extend: bool
) -> Examined:
    """Runs the checks that need no other rank; `chosen`: the precision of a run that begins."""
    checks = check_software(
        compiles=config.train.compile not in (False, "auto"),
        deepspeed=config.train.engine_on(ranks.world_size) == "deepspeed",
    )
    try:
        setup = set_up(config, ranks)
        config = setup.config
        folder = open_run_folder(config)
        identity = run_identity(config, derived=setup.data.identity)
        checkpoint, stop = foresee_start(
            folder, resume, identity, setup.plan, extend=extend, warn=ranks.rank == 0
        )
        if checkpoint is None and config.model.init is not None:
            initialize(setup.build(), config, setup.info, say=ranks.rank == 0)
        config, _, chosen = settle_precision(config, identity, checkpoint, chosen, setup.device)
        setup = replace(setup, config=config)
        checks += check_devices(ranks, setup.device, chosen)
        checks += check_run(setup, folder.path)
        if stop:
            checks.append(Check("warn", "run", f"nothing is trained now; the run itself will stop: {stop}"))
    except (InputError, FetchUnavailable) as error:
        return Examined([*checks, Check("FAIL", "plan", str(error))], None, error=error)
    return Examined(checks, setup.device, setup, describe_plan(setup, folder, checkpoint, chosen) + "\n\n")


def check_run(setup: Setup, folder: Path) -> list[Check]:
    """Runs the checks of the run: memory, disk, data, workers."""
    config, ranks, costs = setup.config, setup.ranks, setup.costs
    sharing = {"world_size": ranks.world_size, "zero_stage": config.train.zero_stage}
    least = costs.least_gib(**sharing, kept_bytes=least_kept(setup))
    height, width = setup.info.img_size
    batch_bytes = setup.plan.batch_size_per_device * setup.info.in_chans * height * width
    batch_bytes *= setup.data.source.dtype.itemsize
    return [
        check_memory(least, costs.memory_gib(**sharing), ranks, setup.device),
        check_disk(folder, retention(setup.config, setup.plan, setup.costs)[1]),
        check_locks(folder),
        *check_workers(setup.data.workers, batch_bytes, ranks),
        *check_cores(setup.data),
        *check_shards(setup.data, ranks),
        check_samples(setup.data, setup.info.in_chans, config.data.damage_budget),
    ]


def check_shards(data: Data, ranks: Ranks) -> list[Check]:
    """Looks at shards against ranks and workers."""
    shards = len(data.index.split_info.shards)
    text = f"{count_of(shards, 'shard')} for {count_of(ranks.world_size, 'rank')} of {count_of(data.workers, 'worker')}"
    checks = [Check("warn", "shards", warning) for warning in order_warnings(data)]
    if data.order.blocks and not checks:
        text += f", in {data.order.blocks.num_blocks} blocks"
    # Any number does in the order "global": samples are read one by one.
    return checks or [Check("ok", "shards", text)]


def check_cores(data: Data) -> list[Check]:
    """Checks the data workers of a rank."""
    warnings = data.core_warnings()
    if data.workers > data.cores:
        few = f"{count_of(data.workers, 'worker')} of a rank on its {count_of(data.cores, 'core')}"
        warnings.append(f"{few}: data.workers=auto, or more cores (sbatch --cpus-per-task)")
    return [Check("warn", "cores", warning) for warning in warnings]


def check_samples(data: Data, channels: int, budget: float) -> Check:
    """Reads and decodes some samples, evenly spread over the split."""
    index = data.index
    # From elsewhere each shard would be fetched whole.
    last = len(index) if index.remote is None else index.split_info.shards[0].samples
    chosen = np.linspace(0, last - 1, min(_READ_SAMPLES, last)).astype(int).tolist()
    broken, begun = [], time.monotonic()
    for sample in chosen:
        try:
            decode_sample(index, sample, channels, index.dataset.bands)
        except (ReadError, DecodeError) as error:
            broken.append(index.damage(sample, str(error)))
    rate = len(chosen) / (time.monotonic() - begun)
    text = f"{len(chosen)} of {count_of(len(index), 'sample')} read and decoded, {rate:,.0f}/s on one core"
    if not broken:
        return Check("ok", "samples", text)
    # What a few say of all.
    status: Status = "FAIL" if len(broken) / len(chosen) > budget else "warn"
    allowed = damage_allowed(budget, len(index))
    return Check(
        status,
        "samples",
        f"{text}; {len(broken)} damaged, the first: {broken[0]}; data.damage_budget allows {allowed:,} of all: "
        f"`mae-vit check {index.folder}`",
    )


def try_batches(setup: Setup) -> Check:
    """Tries micro-batch sizes and prints their speed."""
    print("\nimages of a micro-batch   images/s   GiB (weights and states unsharded)")
    trials: list[Trial] = []
    for trial in find_batch(setup):
        trials.append(trial)
        rate = "does not fit" if trial.images_per_s is None else f"{trial.images_per_s:,.0f}"
        print(f"{trial.batch_size_per_device:>23}   {rate:>8}   {trial.gib:.2f}", flush=True)
    best = best_of(trials)
    if best is None:
        check = Check("FAIL", "batch", "none fits: a smaller model, or train.activation_checkpointing=true")
    else:
        check = Check("ok", "batch", f"use train.batch_size_per_device={best.batch_size_per_device}")
    print(check, end="\n\n")
    return check
