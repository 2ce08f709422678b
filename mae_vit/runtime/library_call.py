"""What a call from Python finds and leaves: a process that lives on, with state of its own."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from mae_vit.core.errors import InputError
from mae_vit.runtime.failures import RunInterrupted
from mae_vit.runtime.process_group import leave
from mae_vit.runtime.signals import process_lives_on

# Whose level a run raises.
_LOGGERS = ("DeepSpeed", "tensorboard")


@contextmanager
def library_call() -> Iterator[None]:
    """Runs a job for a caller: with torch's settings as a fresh process has them, and the caller's again after it.

    Signal handlers, the environment, generators of random numbers, torch's threads and flags, and the process group
    are as before. One thing stays: glibc reuses freed memory (`keep_freed_memory`), which no result depends on.

    Raises:
        InputError: if the process has a process group already.
        KeyboardInterrupt: after Ctrl-C, once the run is saved.
        RunInterrupted: after another stop request, once the run is saved.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise InputError(
            "this process has a torch.distributed process group: destroy it first, for a run makes its own"
        )
    with ExitStack() as state:
        for held in (process_lives_on, _environment, _random_numbers, _torch_settings, _log_levels, _backend):
            state.enter_context(held())
        try:
            yield
        except RunInterrupted as stopped:
            leave()
            if stopped.reason == "SIGINT":
                raise KeyboardInterrupt from None
            raise
        except BaseException:
            # With others in the group, one that fails alone would wait for them.
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1:
                leave()
            raise
        leave()


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _random_numbers() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    # On every device: a run seeds them all.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _torch_settings() -> Iterator[None]:
    """Gives a run torch as a process begins with, where that decides what it computes."""
    # Slow to import, and there already where a model is.
    from torch._inductor import config as inductor

    threads, compile_threads = torch.get_num_threads(), inductor.compile_threads
    strict, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    benchmark, tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        inductor.compile_threads = compile_threads
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32
        if gpu is not None:
            torch.cuda.set_device(gpu)


@contextmanager
def _log_levels() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _backend() -> Iterator[None]:
    """Keeps matplotlib's backend: that of a notebook shows figures, a report's writes files."""
    before = _backend_of(sys.modules.get("matplotlib")) or os.environ.get("MPLBACKEND")
    try:
        yield
    finally:
        matplotlib = sys.modules.get("matplotlib")
        if before and matplotlib is not None and _backend_of(matplotlib) != before:
            matplotlib.use(before)


def _backend_of(matplotlib: Any) -> str | None:
    # Not rcParams["backend"], which chooses one if there is none yet.
    value = dict.get(matplotlib.rcParams, "backend") if matplotlib is not None else None
    return value if isinstance(value, str) else None
