"""Checks of a machine before a run."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from mae_vit.core.files import nearest_existing
from mae_vit.core.messages import count_of, error_reason
from mae_vit.runtime.cores import control_groups
from mae_vit.runtime.locks import try_lock
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.precision import Chosen

Status = Literal["ok", "warn", "FAIL"]

_OLDEST_PYTHON = (3, 10)
_FULL = 0.9  # of a memory, beyond which nothing is left for fragments and libraries
_FILES = 1024


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        status: "ok", "warn" (works, but look) or "FAIL" (will not work).
        name: of the check.
        text: the result and, if there is a problem, what to do.
    """

    status: Status
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<5}{self.name:<12}{self.text}"


def check_software(*, compiles: bool, deepspeed: bool) -> list[Check]:
    """Looks at Python, PyTorch, its CUDA, DeepSpeed, and a compiler where one is needed.

    Args:
        compiles: the run uses torch.compile.
        deepspeed: the run uses DeepSpeed.
    """
    checks = []
    version = platform.python_version()
    new_enough = sys.version_info >= _OLDEST_PYTHON
    checks.append(
        Check("ok", "python", version)
        if new_enough
        else Check("FAIL", "python", f"{version}: 3.10 or newer is needed")
    )
    checks.append(_check_torch())
    if deepspeed:
        checks.append(_check_deepspeed())
    if compiles:
        compiler = next(
            filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None
        )
        if compiler:
            checks.append(Check("ok", "compiler", compiler))
        else:
            checks.append(
                Check(
                    "FAIL",
                    "compiler",
                    "none, but train.compile=true needs one: install g++",
                )
            )
    return checks


def _check_torch() -> Check:
    built = f"torch {torch.__version__}"
    driver = shutil.which("nvidia-smi")
    if torch.cuda.is_available():
        return Check("ok", "torch", f"{built}, CUDA {torch.version.cuda}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Check("ok", "torch", f"{built}, GPUs are hidden by CUDA_VISIBLE_DEVICES: runs on the CPU")
    if driver and torch.version.cuda is None:
        return Check(
            "FAIL",
            "torch",
            f"{built} has no CUDA, but there is a driver: install one with CUDA",
        )
    if driver:
        return Check(
            "FAIL", "torch", f"{built} with CUDA {torch.version.cuda} finds no device: {_cuda_problem()}"
        )
    return Check("ok", "torch", f"{built}, no GPU driver: runs on the CPU")


def _cuda_problem() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f'CUDA_VISIBLE_DEVICES is "{visible}"' if visible is not None else "see `nvidia-smi`"


def _check_deepspeed() -> Check:
    # In a process of its own: what it compiles or prints at import is no part of this one.
    begun = time.monotonic()
    tried = subprocess.run(
        [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("FAIL", "deepspeed", f"cannot be imported: {last}; train.engine=torch does without")
    version, took = tried.stdout.strip().splitlines()[-1], time.monotonic() - begun
    return Check(
        "ok",
        "deepspeed",
        f"{version}, imported in {took:.0f} s; it needs no compiled operations",
    )


def check_devices(ranks: Ranks, device: torch.device, precision: Chosen) -> list[Check]:
    """Looks at this rank's device, and whether the node has others that nobody uses."""
    precise = Check("warn" if precision.warning else "ok", "precision", precision.warning or str(precision))
    if device.type != "cuda":
        return [Check("ok", "device", f"CPU, {count_of(ranks.cores, 'core')} for each rank"), precise]
    count = torch.cuda.device_count()
    checks = [Check("ok", "device", f"{torch.cuda.get_device_name(device)}, {device}"), precise]
    if count > max(1, ranks.local_world_size):
        checks.append(
            Check(
                "warn",
                "device",
                f"{count} GPUs here, {ranks.local_world_size} ranks: start it with `deepspeed`",
            )
        )
    return checks


def check_memory(least_gib: float, most_gib: float, ranks: Ranks, device: torch.device) -> Check:
    """Compares a rank's memory needs with the free memory of its device.

    Args:
        least_gib: that it cannot do without.
        most_gib: upper bound: in float32, with attention maps.
        ranks: of the run.
        device: of this rank.
    """
    free, whose = free_memory_gib(ranks, device)
    text = f"about {least_gib:.2f} to {most_gib:.2f} GiB for each rank; {whose} has {free:.1f} GiB free"
    if least_gib > free:
        return Check(
            "FAIL",
            "memory",
            f"{text}: smaller train.batch_size_per_device (--find-batch tries), train.activation_checkpointing=true, "
            "or a higher train.zero_stage over more ranks",
        )
    if most_gib > _FULL * free:
        return Check("warn", "memory", f"{text}: it may not fit, try it with --find-batch")
    return Check("ok", "memory", text)


def free_memory_gib(ranks: Ranks, device: torch.device) -> tuple[float, str]:
    """Memory that a rank may take, and whose it is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30, "the GPU"
    free = psutil.virtual_memory().available
    limit = _container_limit()
    if limit is not None:
        free = min(free, limit)
    return free / 2**30 / max(1, ranks.local_world_size), "a rank's share of this machine"


def _container_limit(**places: Path) -> int | None:
    """What a container or a job leaves, where there is one: the machine's figures do not know of it."""
    rooms = [room for group in control_groups("memory", **places) if (room := _room_in(group)) is not None]
    return min(rooms, default=None)


def _room_in(group: Path) -> int | None:
    """Bytes below the limit of one group, of version 2 or 1; None where it has none."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for most, used in names:
        with suppress(OSError, ValueError):
            limit, taken = (group / most).read_text().strip(), int((group / used).read_text())
            # Files that were read are given up when memory is needed.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0))
            return None if limit == "max" else int(limit) - taken + cached
    return None


def check_disk(folder: Path, needed: int) -> Check:
    """Compares the size of a run's files with the free space of its disk."""
    place = nearest_existing(folder)
    free = shutil.disk_usage(place).free
    text = f"{needed / 2**30:.2f} GiB for checkpoints and results; {place} has {free / 2**30:.1f} GiB free"
    if needed > free:
        return Check("FAIL", "disk", f"{text}: make room, or fewer checkpoint.keep_last")
    if needed > _FULL * free:
        return Check("warn", "disk", f"{text}: it will be nearly full")
    return Check("ok", "disk", text)


def check_locks(folder: Path) -> Check:
    """Whether a second process on the same run would be noticed: some file systems have no locks."""
    place = nearest_existing(folder)
    probe = place / f".mae-vit-doctor-{os.getpid()}"
    try:
        first, second = try_lock(probe), try_lock(probe)
        for lock in (first, second):
            if lock is not None:
                lock.release()
        if second is not None:
            return Check(
                "warn",
                "locks",
                f"{place} has none: two processes on one run are not kept apart",
            )
        return Check("ok", "locks", f"files in {place} can be locked")
    except OSError as error:
        return Check("FAIL", "locks", f"{place} cannot be written: {error_reason(error)}")
    finally:
        probe.unlink(missing_ok=True)


def check_workers(workers: int, batch_bytes: int, ranks: Ranks) -> list[Check]:
    """Checks shared memory and open files of data workers.

    Args:
        workers: of each rank.
        batch_bytes: of a micro-batch's images.
        ranks: this process's place.
    """
    checks = []
    shared = Path("/dev/shm")
    if workers and shared.exists():
        # Each keeps two batches ready.
        needed, free = ranks.local_world_size * workers * 2 * batch_bytes, shutil.disk_usage(shared).free
        text = f"{needed / 2**30:.2f} GiB for batches of workers; /dev/shm has {free / 2**30:.2f} GiB free"
        fits = needed <= _FULL * free
        todo = "" if fits else ": a larger one (docker run --shm-size), or fewer data.workers"
        checks.append(Check("ok" if fits else "FAIL", "shm", text + todo))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        checks.append(
            Check("warn", "files", f"only {soft} may be open at a time: raise it (ulimit -n {_FILES})")
        )
    return checks
