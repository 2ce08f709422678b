"""Which device a command computes on."""

from __future__ import annotations

import torch

from mae_vit.errors import InputError


def choose_device(asked: str) -> torch.device:
    """Resolves "auto": a GPU where there is one.

    Raises:
        InputError: if the device that is asked for is not there.
    """
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: there is no CUDA device here, or torch has no CUDA; --device cpu is slow"
        )
    return torch.device(asked)
