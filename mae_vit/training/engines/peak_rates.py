"""Peak FLOP/s of GPUs, for the model FLOPs utilization (MFU) of a run."""

from __future__ import annotations

import re

import torch

# Dense 16-bit tensor peaks in FLOP/s by the words of a device's name, more specific names first. They are
# from NVIDIA's datasheets. Most of these state the peak with sparsity, which is twice as high.
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
    # These have no bf16; the peak is that of fp16.
    ("V100 PCIe", 112e12),
    ("V100", 125e12),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the device's peak FLOP/s for bf16 and fp16; None if unknown (CPUs, fp32, slices of a GPU)."""
    if device.type != "cuda" or precision == "fp32":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Returns the dense 16-bit peak FLOP/s for a device's name; None for slices (MIG) and unknown names."""
    words = set(re.findall(r"\w+", name.upper()))
    if "MIG" in words:
        return None
    return next((peak for model, peak in _PEAKS if words.issuperset(model.upper().split())), None)
