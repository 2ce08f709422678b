"""Checks config, data, memory and ranks before a run: `--dry-run` and `mae-vit doctor`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from mae_vit.config.command_line import Arguments
from mae_vit.core.errors import EXIT_FAILED, FetchUnavailable, InputError, damage_allowed
from mae_vit.core.files import nearest_existing
from mae_vit.core.messages import count_of, error_reason
from mae_vit.data.batches.ring import ring_size
from mae_vit.data.batches.sources import decode_sample
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import Data
from mae_vit.pretraining.plan_text import describe_plan, order_warnings
from mae_vit.pretraining.setup import Setup, initialize, least_kept, set_up
from mae_vit.runtime.device import find_device, free_memory_gib
from mae_vit.runtime.process_group import join, meet
from mae_vit.runtime.ranks import Ranks, gather_objects
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo, list_checkpoints
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.outputs.environment import versions_of
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import retention
from mae_vit.training.startup import agree_on_precision, foresee_start, open_run_folder, settle_precision

_FULL = 0.9  # usable fraction of memory or disk; fragmentation and libraries take the rest
_OPEN_FILES = 1024
_READ_SAMPLES = 64
_JOIN_TIMEOUT_S = 60.0
# Joined ranks wait for each other to open the data.
_CHECK_TIMEOUT_S = 1800.0
_EXCHANGED_BYTES = 64 << 20
# Packages whose versions must be equal on all ranks: collectives and data reading depend on them.
_COMPARED = ("mae-vit", "torch", "torchvision", "timm", "deepspeed", "numpy", "simplejpeg", "pillow")


@dataclass(frozen=True)
class Check:
    """A result: "ok", "warn" (works, but needs a look) or "FAIL", the check's name, and text with the remedy."""

    status: Literal["ok", "warn", "FAIL"]
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<5}{self.name:<12}{self.text}"


def check_all(config: PretrainConfig | None, ranks: Ranks, arguments: Arguments) -> int:
    """Prints the plan of a run and all checks on rank 0; trains nothing; collective. Returns 1 if a check fails.

    Raises:
        InputError: if the run cannot be set up; with several ranks only after their checks are printed.
    """
    device = None
    with suppress(InputError):  # `set_up` or `find_device` raises it again below
        device = find_device(ranks, config.run.device if config else "auto")
    met = join_ranks(ranks, device)
    if met.status != "ok":
        # Without a connection each rank prints for itself.
        print(met, flush=True)
        return EXIT_FAILED
    asked = config.train.precision if config else "auto"
    chosen = agree_on_precision(asked, device or torch.device("cpu"), ranks)
    checks, plan, error = check_software(config, ranks), "", None
    try:
        if config is not None:
            plan, run_checks = _examine_run(config, ranks, arguments, chosen)
            checks += run_checks
        else:
            checks += check_devices(ranks, find_device(ranks), chosen)
    except (InputError, FetchUnavailable) as caught:
        if ranks.world_size == 1:
            raise
        error = caught
        checks.append(Check("FAIL", "plan", str(error)))
    checks = merge_checks([*checks, met, check_exchange(ranks, device), check_versions(ranks)], ranks)
    failures, warnings = (sum(check.status == status for check in checks) for status in ("FAIL", "warn"))
    if ranks.rank == 0:
        counts = f"{count_of(failures, 'check')} failed, {count_of(warnings, 'warning')}"
        counts = counts if failures or warnings else "all checks passed"
        lines = [*map(str, checks), f"{counts}; nothing was trained"]
        if config is None:
            lines.append(
                "not checked: data, workers, memory and disk, which depend on the run (mae-vit doctor CONFIG)"
            )
        print(plan + "\n".join(lines), flush=True)
    if error is not None:
        raise error
    return EXIT_FAILED if failures else 0


def _examine_run(
    config: PretrainConfig, ranks: Ranks, arguments: Arguments, chosen: Chosen
) -> tuple[str, list[Check]]:
    """Sets up a run without changing its folder; returns its plan as text, and this rank's checks."""
    setup = set_up(config, ranks)
    config = setup.config
    folder = open_run_folder(config)
    checkpoint, stop = foresee_start(setup, arguments, folder)
    if checkpoint is None and config.model.init is not None:
        initialize(setup.build(), config, setup.info, say=ranks.rank == 0)
    setup, chosen = settle_precision(setup, checkpoint, chosen)
    checks = [*check_devices(ranks, setup.device, chosen), *check_run(setup, folder, checkpoint)]
    if stop:
        checks.append(Check("warn", "run", f"nothing is trained now; a run would stop: {stop}"))
    return describe_plan(setup, folder, checkpoint, chosen) + "\n\n", checks


def check_software(config: PretrainConfig | None, ranks: Ranks) -> list[Check]:
    """Checks that torch sees the GPUs, and that other software for the run's options is installed."""
    driver = shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    text = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    if not torch.cuda.is_available():
        text += (
            " finds no device, though there is a driver (`nvidia-smi`); install a torch for its CUDA version"
            if driver
            else ", no GPU: runs on the CPU"
        )
    checks = [Check("FAIL" if driver and not torch.cuda.is_available() else "ok", "torch", text)]
    if config and config.train.engine_on(ranks) == "deepspeed":
        try:
            import_module("mae_vit.training.engines.deepspeed_engine")
        except Exception as error:  # whatever a broken installation raises
            reason = f"cannot be imported: {error_reason(error)}; use train.engine=torch"
            checks.append(Check("FAIL", "deepspeed", reason))
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if config and config.train.compile is True and not any(map(shutil.which, compilers)):
        checks.append(Check("FAIL", "compiler", "none, but train.compile=true needs one; install g++"))
    return checks


def check_devices(ranks: Ranks, device: torch.device, precision: Chosen) -> list[Check]:
    """Checks this rank's device and precision, and whether the node has unused GPUs."""
    precise = Check("warn" if precision.warning else "ok", "precision", precision.warning or str(precision))
    if device.type != "cuda":
        return [Check("ok", "device", f"CPU, {count_of(ranks.cores, 'core')} for each rank"), precise]
    checks = [Check("ok", "device", f"{torch.cuda.get_device_name(device)}, {device}"), precise]
    if (count := torch.cuda.device_count()) > max(1, ranks.local_world_size):
        text = f"{count} GPUs here, but {ranks.local_world_size} ranks; start it with `deepspeed`"
        checks.append(Check("warn", "device", text))
    return checks


def check_run(setup: Setup, folder: RunFolder, checkpoint: CheckpointInfo | None) -> list[Check]:
    """Checks memory, disk, loading and data of a run."""
    config, ranks = setup.config, setup.ranks
    height, width = setup.info.img_size
    batch_size = setup.plan.batch_size_per_device
    _, slots = ring_size(batch_size, max(1, setup.data.workers), setup.data.order.repeats)
    ring_bytes = (
        slots * batch_size * setup.info.in_chans * height * width * setup.data.source.source.dtype.itemsize
    )
    kept, needed = retention(config, setup.plan, setup.costs)
    there = list_checkpoints(folder.checkpoints) if folder.has(checkpoint) else []
    return [
        check_memory(setup),
        check_disk(folder.path, needed - min(kept, len(there)) * setup.costs.checkpoint_bytes),
        *check_loading(setup.data, ring_bytes, ranks),
        check_samples(setup.data, setup.info.in_chans, config.data.damage_budget),
    ]


def _check_room(name: str, text: str, remedy: str, *, least: float, most: float, free: float) -> Check:
    """Fails if `least` exceeds `free`, and warns if `most` may fill it; all in the same unit."""
    status: Literal["ok", "warn", "FAIL"] = (
        "FAIL" if least > free else "warn" if most > _FULL * free else "ok"
    )
    return Check(status, name, text if status == "ok" else f"{text}: {remedy}")


def check_memory(setup: Setup) -> Check:
    """Compares a rank's memory needs with the free memory of its device."""
    sharing = {"world_size": setup.ranks.world_size, "zero_stage": setup.config.train.zero_stage}
    most_gib, (free, whose) = setup.costs.memory_gib(**sharing), free_memory_gib(setup.ranks, setup.device)
    room = f"GiB for each rank; {whose} has {free:.1f} GiB free"
    if most_gib <= _FULL * free:
        return Check("ok", "memory", f"at most about {most_gib:.2f} {room}")
    # Takes a second, so only where it decides.
    least_gib = setup.costs.least_gib(**sharing, kept_bytes=least_kept(setup))
    text = f"about {least_gib:.2f} to {most_gib:.2f} {room}"
    remedy = "smaller train.batch_size_per_device, train.activation_checkpointing=true, or a higher "
    remedy += "train.zero_stage over more ranks"
    return _check_room("memory", text, remedy, least=least_gib, most=most_gib, free=free)


def check_disk(folder: Path, needed: int) -> Check:
    """Compares the size of the files that a run still writes, in bytes, with the free space of its disk."""
    place = nearest_existing(folder)
    free = shutil.disk_usage(place).free
    text = f"{needed / 2**30:.2f} GiB for checkpoints and results; {place} has {free / 2**30:.1f} GiB free"
    remedy = "make room, or fewer checkpoint.keep_last"
    return _check_room("disk", text, remedy, least=needed, most=needed, free=free)


def check_loading(data: Data, ring_bytes: int, ranks: Ranks) -> list[Check]:
    """Checks shards, cores, open files and shared memory for the data workers; a rank's ring has `ring_bytes`."""
    workers = data.workers
    warnings = [("shards", text) for text in order_warnings(data)]
    warnings += [("cores", text) for text in data.core_warnings()]
    if workers > data.cores:
        few = f"{count_of(workers, 'worker')} of a rank on its {count_of(data.cores, 'core')}"
        warnings.append(("cores", f"{few}: data.workers=auto, or more cores (sbatch --cpus-per-task)"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        warnings.append(("files", f"only {soft} may be open at a time; raise it (ulimit -n {_OPEN_FILES})"))
    shards = count_of(len(data.index.split_info.shards), "shard")
    checks = [Check("warn", name, text) for name, text in warnings]
    checks += [Check("ok", "loading", f"{shards}, {count_of(workers, 'worker')} of each rank")]
    shared = Path("/dev/shm")
    if workers and shared.exists():
        needed, free = ranks.local_world_size * ring_bytes, shutil.disk_usage(shared).free
        text = f"{needed / 2**30:.2f} GiB for batches of workers; /dev/shm has {free / 2**30:.2f} GiB free"
        instead = "or data.workers=0" if data.pin_memory else "else they lie on the disk of temporary files"
        remedy = f"a larger one (docker run --shm-size); {instead}"
        # Files on a disk cannot be page-locked.
        least = needed if data.pin_memory else 0
        checks.append(_check_room("shm", text, remedy, least=least, most=needed, free=free))
    return checks


def check_samples(data: Data, channels: int, budget: float) -> Check:
    """Reads and decodes some samples, evenly spread over the split."""
    index = data.index
    # Remote shards would be fetched whole, so read the first one only.
    last = len(index) if index.remote is None else index.split_info.shards[0].samples
    chosen = np.linspace(0, last - 1, min(_READ_SAMPLES, last)).astype(int).tolist()
    broken, begun = [], time.monotonic()
    for sample in chosen:
        try:
            decode_sample(index, sample, channels)
        except (ReadError, DecodeError) as error:
            broken.append(index.damage(sample, str(error)))
    rate = len(chosen) / (time.monotonic() - begun)
    text = f"{len(chosen)} of {count_of(len(index), 'sample')} read and decoded, {rate:,.0f}/s on one core"
    if not broken:
        return Check("ok", "samples", text)
    text += (
        f"; {len(broken)} damaged, the first: {broken[0]}; data.damage_budget allows "
        f"{damage_allowed(budget, len(index)):,} of all: `mae-vit check {index.folder}`"
    )
    # The sampled fraction estimates that of the whole split.
    return Check("FAIL" if len(broken) / len(chosen) > budget else "warn", "samples", text)


def join_ranks(ranks: Ranks, device: torch.device | None) -> Check:
    """Joins all ranks as a run does; the process group remains.

    Ranks with different or missing devices join on the CPU, so that `check_exchange` can report them.
    """
    if ranks.world_size == 1:
        return Check("ok", "ranks", "one rank: no others to connect to")
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = meet(ranks, timeout=timedelta(seconds=_JOIN_TIMEOUT_S))
        store.set(f"doctor/{ranks.rank}", device.type if device else "none")
        kinds = {store.get(f"doctor/{rank}") for rank in range(ranks.world_size)}
        common = device if device and len(kinds) == 1 else torch.device("cpu")
        join(ranks, common, timeout=timedelta(seconds=_CHECK_TIMEOUT_S), store=store)
    except (RuntimeError, InputError) as error:
        text = f"rank {ranks.rank} on {socket.gethostname()}: {error_reason(error)[:400]}"
        return Check("FAIL", "ranks", text)
    return Check("ok", "ranks", f"{ranks.world_size} ranks met at {address}")


def check_exchange(ranks: Ranks, device: torch.device | None) -> Check:
    """Times an all-reduce over the joined ranks, and checks its result; collective."""
    if ranks.world_size == 1:
        return Check("ok", "network", "one rank: nothing to exchange")
    kind = device.type if device else "none"
    hosts: dict[str, str] = dict(gather_objects((kind, socket.gethostname()), ranks))
    if len(hosts) > 1 or device is None:
        devices = ", ".join(f"{kind} (on {host})" for kind, host in hosts.items())
        return Check("FAIL", "network", f"ranks have different devices, or none: {devices}")
    try:
        torch.distributed.all_reduce(torch.ones(1, device=device))
        values, begun = torch.ones(_EXCHANGED_BYTES // 4, device=device), time.monotonic()
        torch.distributed.all_reduce(values)
        right = bool((values == ranks.world_size).all())
    except RuntimeError as error:
        return Check("FAIL", "network", f"ranks cannot exchange numbers: {error_reason(error)[:200]}")
    if not right:
        return Check("FAIL", "network", f"{ranks.world_size} ranks do not add up; the network changes data")
    rate = _EXCHANGED_BYTES / (time.monotonic() - begun) / 1e9
    return Check("ok", "network", f"ranks add {rate:.2f} GB/s on {device.type}")


def check_versions(ranks: Ranks) -> Check:
    """Compares the package versions of all ranks, which must have joined; collective."""
    versions = {"python": platform.python_version(), **versions_of(_COMPARED)}
    by_rank: list[tuple[str, dict[str, str]]] = gather_objects((socket.gethostname(), versions), ranks)
    differing = [
        f"{name} {version} (rank 0 on {by_rank[0][0]}), {other[name]} (rank {rank} on {host})"
        for name, version in by_rank[0][1].items()
        for rank, (host, other) in enumerate(by_rank)
        if other[name] != version
    ]
    if differing:
        text = f"differ: {'; '.join(differing[:10])}; install the same on all nodes"
        return Check("FAIL", "versions", text)
    return Check("ok", "versions", ", ".join(f"{name} {version}" for name, version in versions.items()))


def merge_checks(checks: list[Check], ranks: Ranks) -> list[Check]:
    """Returns rank 0's checks, and those of other ranks that are not "ok"; collective."""
    by_rank: list[list[Check]] = gather_objects(checks, ranks)
    merged = {(check.name, check.text): check for check in by_rank[0]}
    for rank, rank_checks in enumerate(by_rank):
        for check in rank_checks:
            if check.status != "ok":
                named = replace(check, text=f"rank {rank}: {check.text}")
                merged.setdefault((check.name, check.text), named)
    return list(merged.values())
