"""This process's device, cores and memory."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from mae_vit.core.errors import InputError
from mae_vit.runtime.cores import control_groups
from mae_vit.runtime.ranks import Ranks, choose_threads


def forbid_tf32() -> None:
    """Keeps float32 in convolutions of this process; torch lets them, but not matrix products, use TF32 on a GPU.

    A patch projection is a convolution. With TF32 its relative error is near 1e-3, and whether it is used depends
    on the memory layout, which compiling changes.
    """
    torch.backends.cudnn.allow_tf32 = False


def choose_device(asked: str) -> torch.device:
    """Resolves "auto": a GPU if there is one. For a process that computes features; it uses no TF32.

    Raises:
        InputError: if the device that is asked for is not there.
    """
    forbid_tf32()
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: there is no CUDA device here, or torch has no CUDA; --device cpu is slow"
        )
    return torch.device(asked)


# mallopt's parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory instead of giving it back to the kernel.

    By default each large tensor is mapped afresh, and its pages are zeroed at first
    touch, in every operation of every step: a third of the time of a small ViT's
    training step on a CPU (`benchmarks/step.py` measures it). Peak memory is as before.

    Returns:
        False where the C library is not glibc; then nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
    except (OSError, AttributeError):
        return False


def find_device(ranks: Ranks, asked: str = "auto") -> torch.device:
    """Returns this rank's GPU, or the CPU without one or for `asked` "cpu"; sets its threads, forbids TF32.

    Raises:
        InputError: if the node has fewer GPUs than ranks.
    """
    # By itself each rank starts a compiler for every core that it sees: 256 on a node of eight unbound ranks.
    from torch._inductor import config  # slow to import, and there already where a model is

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = min(32, ranks.cores)
    forbid_tf32()
    if asked != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        # A launcher may show each rank only its own GPU.
        number = ranks.local_rank if count > 1 else 0
        if number >= count:
            raise InputError(f"local rank {ranks.local_rank} has no GPU: this node shows {count}")
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    keep_freed_memory()
    torch.set_num_threads(choose_threads(ranks)[0])
    return torch.device("cpu")


def free_memory_gib(ranks: Ranks, device: torch.device) -> tuple[float, str]:
    """Memory that a rank may take, and whose it is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30, "the GPU"
    # A container or a job may have less than its machine.
    rooms = (room_in(group) for group in control_groups("memory"))
    free = min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)])
    return free / 2**30 / max(1, ranks.local_world_size), "a rank's share of this machine"


def room_in(group: Path) -> int | None:
    """Bytes below the memory limit of a control group, of version 2 or 1; None where it has none."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for most, used in names:
        with suppress(OSError, ValueError):  # not there; or "max", which is no number
            limit, taken = int((group / most).read_text()), int((group / used).read_text())
            # The kernel gives up cached files when memory is needed.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return limit - taken + int(stat.get("inactive_file", 0))
    return None
