"""What a run will cost, measured on the meta device: nothing is computed or allocated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import Block
from torch.utils.flop_counter import FlopCounterMode

from mae_vit.batch import Batch
from mae_vit.encoder import set_fused_attention
from mae_vit.keyed import SampleKeys
from mae_vit.objectives.base import Task
from mae_vit.training.precision import AUTOCAST_DTYPES, Precision

# Side of the square matrices whose product is timed, on a CPU and on a GPU; and for how long.
_MEASURED_SIDE, _MEASURED_S = (512, 8192), 0.2
# Dense bf16 peaks in FLOP/s, from the vendors' datasheets (without sparsity).
_PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


@dataclass(frozen=True)
class Estimate:
    """Costs of an objective.

    Attributes:
        parameters: of the encoder and what the objective adds.
        encoder_parameters: of the encoder alone; all where the network has none.
        trainable: parameters that have optimizer state.
        flops_per_image: model FLOPs of a training step: 3 x forward, no recomputation; the mean over its turns.
        activation_bytes: kept for the backward pass of one micro-batch in float32; an
            upper bound for bf16 and fp16.
        optimizer_slots: float32 numbers that the optimizer keeps for each trainable one.
        averaged: a moving average of all parameters is kept, whole on each rank.
    """

    parameters: int
    encoder_parameters: int
    trainable: int
    flops_per_image: float
    activation_bytes: int
    optimizer_slots: int
    averaged: bool = False

    def memory_gib(self, *, world_size: int, zero_stage: int) -> float:
        """Memory of one rank: parameters, gradients, optimizer state and activations.

        At ZeRO 3, while training: evaluation and export gather all parameters once.
        """
        # From ZeRO 1 on, a flat float32 copy of the rank's own share comes along.
        slots = 4 * (self.optimizer_slots + (zero_stage > 0)) / (world_size if zero_stage else 1)
        gradients = 4 / (world_size if zero_stage >= 2 else 1)
        parameters = 4 / (world_size if zero_stage == 3 else 1)
        parameters += 4 * self.averaged
        states = parameters * self.parameters + (gradients + slots) * self.trainable
        return (states + self.activation_bytes) / 2**30

    def describe_compute(self, images: int) -> str:
        """Says what an image costs, and all that a run will see."""
        total = self.flops_per_image * images / 1e15
        return (
            f"{self.flops_per_image / 1e9:.3f} GFLOP per image and step (3 x forward), "
            f"{f'{total:,.0f}' if total >= 100 else f'{total:.3g}'} PFLOP in all"
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return 4 * ((1 + self.averaged) * self.parameters + self.optimizer_slots * self.trainable)


def estimate(
    build: Callable[[], Task],
    *,
    image_shape: tuple[int, int, int],
    batch_size_per_device: int,
    activation_checkpointing: bool = False,
    optimizer_slots: int = 2,
    averaged: bool = False,
) -> Estimate:
    """Measures an objective's costs by building and running it on the meta device.

    Args:
        build: makes the objective.
        image_shape: (C, H, W) of what it is given.
        batch_size_per_device: images of a micro-batch.
        activation_checkpointing: blocks keep their input alone, and one at a time is
            computed again.
        optimizer_slots: tensors that the optimizer keeps for each parameter.
        averaged: a moving average of the weights is kept.
    """
    with torch.device("meta"):
        model = build()
    model.to("meta")  # tables computed in NumPy are not there yet
    # The counter sees the matrix products of plain attention.
    set_fused_attention(model, False)
    images = torch.empty(batch_size_per_device, *image_shape, dtype=torch.uint8, device="meta")
    index = torch.empty(batch_size_per_device, dtype=torch.int64, device="meta")
    flops, kept_bytes = 0, 0
    for step in range(model.turns):
        model.begin_step(step)
        activations = _Activations(model, recomputed=activation_checkpointing)
        with (
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(activations.keep, lambda t: t),
        ):
            kept = model(Batch(images, index, SampleKeys(0, 0, index)))
        del kept
        flops, kept_bytes = flops + counter.get_total_flops(), max(kept_bytes, activations.bytes)
    parameters = list(model.parameters())
    return Estimate(
        parameters=sum(p.numel() for p in parameters),
        encoder_parameters=sum(p.numel() for p in getattr(model, "encoder", model).parameters()),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        flops_per_image=3 * flops / (model.turns * batch_size_per_device),
        activation_bytes=kept_bytes,
        optimizer_slots=optimizer_slots,
        averaged=averaged,
    )


class _Activations:
    """Adds up the storages that autograd keeps, each once; those of parameters are not counted."""

    def __init__(self, model: Task, *, recomputed: bool) -> None:
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: dict[int, int] = {}
        # Within a block that is computed again: what it keeps then.
        self._inside: dict[int, int] | None = None
        self._largest_block = 0
        for module in model.modules() if recomputed else ():
            if isinstance(module, Block):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            kept = self._kept if self._inside is None else self._inside
            kept[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._kept.values()) + self._largest_block

    def _enter(self, block: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.keep(inputs[0])
        self._inside = {}

    def _leave(self, *_: object) -> None:
        assert self._inside is not None
        self._largest_block = max(self._largest_block, sum(self._inside.values()))
        self._inside = None


def matrix_rate(device: torch.device, precision: Precision) -> float:
    """FLOP/s of a square matrix product on this device as it is now, by the fastest of some."""
    side = _MEASURED_SIDE[device.type == "cuda"]
    a, b = (torch.rand(side, side, device=device).to(AUTOCAST_DTYPES.get(precision)) for _ in range(2))
    fastest, spent = float("inf"), 0.0
    while spent < _MEASURED_S:
        _wait_for(device)
        start = time.perf_counter()
        a @ b
        _wait_for(device)
        seconds = time.perf_counter() - start
        fastest, spent = min(fastest, seconds), spent + seconds
    return 2 * side**3 / fastest


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak for bf16 and fp16, None where it is not known (CPUs; fp32)."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in _PEAK_BF16.items() if model in name), None)
