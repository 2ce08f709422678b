"""The precision of the forward and backward pass. Parameters, updates and losses stay float32."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import nn

from mae_vit.core.batch import Batch
from mae_vit.objectives.objective import ObjectiveOutput, Task

Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A comparison sets this variable, so that "auto" is the same for all its runs.
AUTO_PRECISION = "MAE_VIT_AUTO_PRECISION"
# The oldest compute capability with bf16 (Ampere).
_BF16_GPU = (8, 0)
# Large enough that instructions decide, not overheads: a float32 product takes a millisecond.
_SIDE, _TRIES = 256, 5


class Chosen(NamedTuple):
    """The precision of a run, the reason for it, and why another would be better here; empty if none would."""

    precision: Precision
    why: str
    warning: str = ""

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})" + (f"; warning: {self.warning}" if self.warning else "")


def choose_precision(asked: Precision | Literal["auto"], device: torch.device) -> Chosen:
    """Resolves "auto", and warns of a precision that the device has no instructions for."""
    return _automatic(device) if asked == "auto" else fixed(asked, f"train.precision={asked}", device)


def fixed(precision: Precision, why: str, device: torch.device) -> Chosen:
    """Returns a given precision, with a warning if the device has no instructions for it."""
    slow = why_slow(precision, device)
    return Chosen(
        precision, why, slow and f"{slow}; train.precision=auto is {_automatic(device).precision} here"
    )


def why_slow(precision: Precision, device: torch.device) -> str:
    """Says why a precision is slow on the device; empty if the device has instructions for it."""
    if device.type == "cuda" and precision == "bf16" and not _has_bf16(device):
        return f"{torch.cuda.get_device_name(device)} has no bf16, but fp16"
    if device.type == "cpu" and precision != "fp32" and (times := _slowdown(precision)) > 1:
        return f"{precision} is {times:.2g} times slower than fp32 on this processor (matrix products, measured now)"
    return ""


def _automatic(device: torch.device) -> Chosen:
    """Chooses bf16 where the device has instructions for it."""
    if (given := os.environ.get(AUTO_PRECISION)) in get_args(Precision):
        return Chosen(cast(Precision, given), "auto: the comparison's")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if _has_bf16(device):
            return Chosen("bf16", f"auto: {name} has bf16")
        return Chosen("fp32", f"auto: {name} has no bf16; fp16 may be faster")
    if device.type != "cpu":
        return Chosen("fp32", f"auto: on {device.type}")
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return Chosen("fp32", "auto: this processor has neither AVX512_BF16 nor AMX")
    # ONEDNN_MAX_CPU_ISA may forbid the new instructions, and a virtual machine may emulate them.
    if _slowdown("bf16") > 1:
        return Chosen("fp32", "auto: bf16 is slower, though this processor has instructions for it")
    return Chosen("bf16", "auto: this processor has bf16 instructions")


def _has_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _BF16_GPU


@lru_cache
def _slowdown(precision: Precision) -> float:
    """Measures how many times longer a matrix product takes than in float32: one core, fastest of `_TRIES`."""
    full = torch.ones(_SIDE, _SIDE)
    reduced = full.to(AUTOCAST_DTYPES[precision])
    fastest = {full.dtype: float("inf"), reduced.dtype: float("inf")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Alternate, so that other load on the machine affects both.
        for matrix in [full, reduced] * _TRIES:
            start = time.perf_counter()
            matrix @ matrix
            fastest[matrix.dtype] = min(fastest[matrix.dtype], time.perf_counter() - start)
    except RuntimeError:  # oneDNN has no such product for the allowed instructions
        return float("inf")
    finally:
        torch.set_num_threads(threads)
    return fastest[reduced.dtype] / fastest[full.dtype]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Returns the autocast context of a precision, for a forward pass without `Autocast`."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class Autocast(nn.Module):
    """Runs an objective in the run's precision."""

    def __init__(self, objective: Task, device: torch.device, precision: Precision) -> None:
        super().__init__()
        self.objective = objective
        self._device, self._precision = device, precision
        # `Module.compile` sets this attribute.
        self._compiled = objective._compiled_call_impl is not None

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the loss under autocast; losses themselves are float32."""
        with self.context():
            # Convert the keys here, outside the compiled function.
            return self.objective(replace(batch, keys=batch.keys.for_compiled()) if self._compiled else batch)

    def context(self) -> torch.autocast:
        """Returns the autocast context of this run's precision."""
        return autocast(self._device, self._precision)
