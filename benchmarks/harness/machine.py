"""The machine that a benchmark runs on, in words that name no machine: processor, memory, load."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

# Instruction sets that decide how fast matrix products are in fp32, bf16 and int8.
_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
_CPU_INFO = Path("/proc/cpuinfo")
_GIB = 2**30


def load_1min() -> float | None:
    """The mean number of runnable processes in the last minute; None where there is none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


# A benchmark itself is a load: this is the load before it.
LOAD_AT_START = load_1min()


def describe_machine(threads: int) -> dict[str, Any]:
    """What readers need to compare times with theirs.

    Args:
        threads: torch's, in each process that is measured.
    """
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": describe_processor(_CPU_INFO.read_text() if _CPU_INFO.exists() else ""),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": _memory_gib(),
        "torch_threads": threads,
        "load_1min_at_start": LOAD_AT_START,
    }


def describe_processor(cpu_info: str) -> dict[str, Any]:
    """Name, family, model and flags that matter, from the text of /proc/cpuinfo.

    A virtual machine often hides the name: family and model still tell the generation.
    """
    fields: dict[str, str] = {}
    for line in cpu_info.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = set(fields.get("flags", "").split())
    return {
        "name": fields.get("model name") or platform.processor(),
        "vendor": fields.get("vendor_id"),
        "family": fields.get("cpu family"),
        "model": fields.get("model"),
        "stepping": fields.get("stepping"),
        "mhz": fields.get("cpu MHz"),
        "cache": fields.get("cache size"),
        "flags": [flag for flag in _FLAGS if flag in flags],
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1)
    except (AttributeError, ValueError, OSError):
        return None
