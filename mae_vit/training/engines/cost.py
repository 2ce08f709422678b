"""What a run will cost, measured on the meta device: nothing is computed or allocated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import Block
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.attention import set_fused_attention
from mae_vit.objectives.objective import Task
from mae_vit.training.engines.precision import AUTOCAST_DTYPES, Precision

# Side of the square matrices whose product is timed, on a CPU and on a GPU; and for how long.
_MEASURED_SIDE, _MEASURED_S = (512, 8192), 0.2
# Numbers (of 4 bytes) that ranks exchange at a time on GPUs at ZeRO 1 to 3; DeepSpeed's default is 500 M.
ZERO_BUCKET = 25_000_000
# Weights that ZeRO 3 keeps gathered at most: DeepSpeed's default of `stage3_max_live_parameters`.
_ZERO_3_GATHERED = 1_000_000_000


@dataclass(frozen=True)
class Estimate:
    """Costs of an objective.

    Attributes:
        parameters: of the encoder and what the objective adds.
        encoder_parameters: of the encoder alone; all where the network has none.
        trainable: parameters that have optimizer state.
        flops_per_image: model FLOPs of a training step: 3 x forward, no recomputation.
        activation_bytes: kept for the backward pass of one micro-batch in float32 with plain
            attention; an upper bound for bf16, fp16 and fused attention.
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
        """Memory of one rank: parameters, gradients, optimizer state and activations; an upper bound, about."""
        lasting, gradients = self._states(world_size, zero_stage)
        return (lasting + gradients + self.activation_bytes) / 2**30

    def least_gib(self, *, world_size: int, zero_stage: int, kept_bytes: int) -> float:
        """What a rank cannot do without: gradients come as what autograd kept goes.

        Args:
            world_size: ranks.
            zero_stage: of DeepSpeed.
            kept_bytes: of a micro-batch, at least (`kept_bytes`).
        """
        lasting, gradients = self._states(world_size, zero_stage)
        return (lasting + max(gradients, kept_bytes)) / 2**30

    def _states(self, world_size: int, zero_stage: int) -> tuple[float, float]:
        """Bytes of one rank that last from step to step, and of gradients."""
        share = 1 / world_size
        # From ZeRO 1 on, a flat float32 copy of the rank's own share comes along.
        slots = 4 * (self.optimizer_slots + (zero_stage > 0)) * (share if zero_stage else 1)
        whole: float = 4 * self.parameters * (1 + self.averaged)
        if zero_stage == 3:
            # Each rank's share; of the others' it keeps what a step has gathered, up to a limit.
            whole += 4 * (share * self.parameters + min(self.parameters, _ZERO_3_GATHERED) - self.parameters)
        exchanged = 4 * min(self.trainable, 2 * ZERO_BUCKET) if zero_stage else 0
        gradients = 4 * self.trainable * (share if zero_stage >= 2 else 1) + exchanged
        return whole + slots * self.trainable, gradients

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
    activations = _Activations(model, recomputed=activation_checkpointing)
    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(activations.keep, lambda t: t),
    ):
        kept = model(Batch(images, index, SampleKeys(0, 0, index)))
    del kept
    parameters = list(model.parameters())
    return Estimate(
        parameters=sum(p.numel() for p in parameters),
        encoder_parameters=sum(p.numel() for p in getattr(model, "encoder", model).parameters()),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        flops_per_image=3 * counter.get_total_flops() / batch_size_per_device,
        activation_bytes=activations.bytes,
        optimizer_slots=optimizer_slots,
        averaged=averaged,
    )


def kept_bytes(
    build: Callable[[], Task],
    *,
    image_shape: tuple[int, int, int],
    batch_size_per_device: int,
    precision: Precision,
    fused_attention: bool,
    activation_checkpointing: bool = False,
) -> int:
    """Measures what autograd keeps of a micro-batch in a precision, autocast's copies of weights among it.

    A step that is not compiled keeps no less. On fake tensors of a CPU, whose autocast and
    fused attention keep what a GPU's do: queries, keys, values, the result, and a sum for each row.

    Args:
        build: makes the objective.
        image_shape: (C, H, W) of what it is given.
        batch_size_per_device: images of a micro-batch.
        precision: of the forward pass.
        fused_attention: without attention maps, as on a GPU.
        activation_checkpointing: blocks keep their input alone.
    """
    with torch.device("meta"):
        model = build()
    model.to("meta")
    set_fused_attention(model, fused_attention)
    dtype = AUTOCAST_DTYPES.get(precision)
    with FakeTensorMode():
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        images = torch.empty(batch_size_per_device, *image_shape, dtype=torch.uint8)
        index = torch.empty(batch_size_per_device, dtype=torch.int64)
        activations = _Activations(model, recomputed=activation_checkpointing)
        with (
            torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
            torch.autograd.graph.saved_tensors_hooks(activations.keep, lambda t: t),
        ):
            kept = model(Batch(images, index, SampleKeys(0, 0, index)))
        del kept
    return activations.bytes


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


def matrix_rate(device: torch.device, precision: Precision, *, side: int | None = None) -> float:
    """FLOP/s of a square matrix product on this device as it is now, by the fastest of some.

    Args:
        device: whose rate.
        precision: of the matrices.
        side: of the matrices; None for one that is quick on a CPU and fills a GPU.
    """
    side = side or _MEASURED_SIDE[device.type == "cuda"]
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
