"""What a run will cost, measured on the meta device: nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from mae_vit.batch import Batch
from mae_vit.encoder import set_fused_attention
from mae_vit.keyed import SampleKeys
from mae_vit.objectives.base import Objective

# Dense bf16 peaks in FLOP/s, from the vendors' datasheets (without sparsity).
_PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


@dataclass(frozen=True)
class Estimate:
    """Costs of an objective.

    Attributes:
        parameters: of the encoder and what the objective adds.
        encoder_parameters: of the encoder alone.
        trainable: parameters that have optimizer state.
        flops_per_image: model FLOPs of a training step: 3 x forward, no recomputation.
        activation_bytes: kept for the backward pass of one micro-batch in float32; an
            upper bound for bf16.
    """

    parameters: int
    encoder_parameters: int
    trainable: int
    flops_per_image: float
    activation_bytes: int

    def memory_gib(self, *, world_size: int, zero_stage: int) -> float:
        """Memory of one rank: parameters, gradients, moments and activations."""
        moments = 8 / (world_size if zero_stage else 1)
        # ZeRO 1 keeps a flat float32 copy of its own share of the parameters.
        share = 4 / world_size if zero_stage else 0
        states = 4 * self.parameters + (4 + moments + share) * self.trainable
        return (states + self.activation_bytes) / 2**30

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return 4 * self.parameters + 8 * self.trainable


def estimate(build: Callable[[], Objective], *, batch_size_per_device: int) -> Estimate:
    """Measures an objective's costs by building and running it on the meta device.

    Args:
        build: makes the objective.
        batch_size_per_device: images of a micro-batch.
    """
    with torch.device("meta"):
        model = build()
    model.to("meta")  # tables computed in NumPy are not there yet
    # The counter sees the matrix products of plain attention.
    set_fused_attention(model, False)
    encoder = model.encoder
    saved: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    height, width = encoder.img_size
    images = torch.empty(
        batch_size_per_device, encoder.in_chans, height, width, dtype=torch.uint8, device="meta"
    )
    index = torch.empty(batch_size_per_device, dtype=torch.int64, device="meta")
    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        kept = model(Batch(images, index, SampleKeys(0, 0, index)))
    del kept
    parameters = list(model.parameters())
    return Estimate(
        parameters=sum(p.numel() for p in parameters),
        encoder_parameters=sum(p.numel() for p in encoder.parameters()),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        flops_per_image=3 * counter.get_total_flops() / batch_size_per_device,
        activation_bytes=sum(saved.values()),
    )


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak for bf16, None where it is not known (CPUs; fp32)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in _PEAK_BF16.items() if model in name), None)
