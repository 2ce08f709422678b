"""The rate of a device's matrix products, which a step's rate is compared with."""

from __future__ import annotations

import time

import torch

from benchmarks.harness.turns import synchronize
from mae_vit.training.engines.precision import AUTOCAST_DTYPES, Precision

# Side of the square matrices whose product is timed (CPU, GPU); the least total time in seconds and number of tries,
# and the longest time. Where other processes compute too, most tries are slow.
_MEASURED_SIDE, _MEASURED_S, _TRIES, _LONGEST_S = (512, 8192), 0.2, 50, 2.0


def matrix_rate(device: torch.device, precision: Precision, *, side: int | None = None) -> float:
    """Measures the FLOP/s of a square matrix product on this device: the fastest of several tries.

    Args:
        device: the device to measure.
        precision: precision of the matrices.
        side: side of the matrices; None chooses 512 on a CPU, which is quick, and 8192 on a GPU, which fills it.
    """
    side = side or _MEASURED_SIDE[device.type == "cuda"]
    a, b = (torch.rand(side, side, device=device).to(AUTOCAST_DTYPES.get(precision)) for _ in range(2))
    a @ b  # the first product also loads the library
    fastest, spent, tries = float("inf"), 0.0, 0
    while (spent < _MEASURED_S or tries < _TRIES) and spent < _LONGEST_S:
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        seconds = time.perf_counter() - start
        fastest, spent, tries = min(fastest, seconds), spent + seconds, tries + 1
    return 2 * side**3 / fastest
