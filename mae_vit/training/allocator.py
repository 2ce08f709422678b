"""Keeps freed memory in the process, on Linux CPUs."""

from __future__ import annotations

import ctypes
import sys

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
