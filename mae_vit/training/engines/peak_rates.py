"""What GPUs reach at most, for the share of it that a run reaches."""

from __future__ import annotations

import re

import torch

# Dense 16-bit tensor peaks in FLOP/s by the words of a device's name, the more special name first. From NVIDIA's
# datasheets, which state most of them with sparsity: twice these.
_PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    # Without bf16: of fp16.
    ("V100 PCIe", 112e12),
    ("V100", 125e12),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak for bf16 and fp16; None where it is not known (CPUs, fp32, parts of a GPU)."""
    if device.type != "cuda" or precision == "fp32":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Dense 16-bit FLOP/s of a device by its name; None for a slice of a GPU (MIG) and for others' names."""
    words = set(re.findall(r"\w+", name.upper()))
    if "MIG" in words:
        return None
    return next((peak for model, peak in _PEAKS if words.issuperset(model.upper().split())), None)
