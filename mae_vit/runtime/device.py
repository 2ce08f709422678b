"""The device and memory of this process."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from mae_vit.core.errors import InputError
from mae_vit.runtime.cores import control_groups
from mae_vit.runtime.ranks import Ranks, choose_threads


def forbid_tf32() -> None:
    """Forbids TF32: torch allows it in convolutions, such as patch projections, and some containers in products.

    With TF32 the relative error is near 1e-3, and whether it is used depends on the memory layout, which compiling
    changes.
    """
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def choose_device(asked: str) -> torch.device:
    """Resolves "auto" (a GPU if there is one) for a process that computes features; forbids TF32. Raises InputError."""
    forbid_tf32()
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: there is no CUDA device, or torch lacks CUDA; use --device cpu (slow)"
        )
    return torch.device(asked)


# mallopt's parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes glibc, where it is used, reuse freed memory instead of returning it to the kernel.

    By default every operation maps its large tensors afresh, and their pages are zeroed at first touch:
    a third of the time of a small ViT's training step on a CPU (`benchmarks/step.py` measures it).
    Peak memory does not change.
    """
    with suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def find_device(ranks: Ranks, asked: str = "auto") -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none or `asked` is "cpu"; sets threads, forbids TF32."""
    # By default each rank starts a compiler for every core that it sees: 256 on a node of eight unbound ranks.
    from torch._inductor import config  # slow import, which a process with a model has already done

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = min(32, ranks.cores)
    forbid_tf32()
    if asked != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        # A launcher may show each rank only its own GPU; `join` finds ranks that share one.
        if ranks.local_world_size > count > 1:
            raise InputError(
                f"{ranks.local_world_size} ranks on this node, which has {count} GPUs; start {count}"
            )
        number = ranks.local_rank if count > 1 else 0
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    keep_freed_memory()
    torch.set_num_threads(choose_threads(ranks)[0])
    return torch.device("cpu")


def free_memory_gib(ranks: Ranks, device: torch.device) -> tuple[float, str]:
    """Returns the free memory of a rank in GiB, and a description of that memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30, "the GPU"
    # A container or a job may have less memory than its machine.
    rooms = (room_in(group) for group in control_groups("memory"))
    free = min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)])
    return free / 2**30 / max(1, ranks.local_world_size), "a rank's share of this machine"


def room_in(group: Path) -> int | None:
    """Returns the bytes left below a control group's memory limit, version 2 or 1; None without a limit."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for most, used in names:
        with suppress(OSError, ValueError):  # missing, or "max"
            limit, taken = int((group / most).read_text()), int((group / used).read_text())
            # The kernel drops cached files when memory is needed.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return limit - taken + int(stat.get("inactive_file", 0))
    return None
