"""Estimates the cost of a run on the meta device, which computes and allocates nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.attention import set_fused_attention
from mae_vit.objectives.objective import Task
from mae_vit.training.engines.precision import Precision, autocast

# Transformer blocks, which `train.activation_checkpointing` computes again.
BLOCKS = (Block, EvaBlock)
# Bucket size on GPUs at ZeRO 1 to 3, in float32 elements. DeepSpeed's default is 500 M.
ZERO_BUCKET = 25_000_000
# Largest number of weights that ZeRO 3 keeps gathered: DeepSpeed's default of `stage3_max_live_parameters`.
_ZERO_3_GATHERED = 1_000_000_000


@dataclass(frozen=True)
class Estimate:
    """Costs of an objective.

    Attributes:
        encoder_parameters: number of the encoder's parameters; of all if the network has no encoder.
        trainable: number of parameters that have optimizer state.
        flops_per_image: model FLOPs of a training step: 3 x forward, without recomputation.
        activation_bytes: bytes of a micro-batch's raw images and of what autograd keeps, in float32 with
            plain attention: an upper bound for bf16, fp16 and fused attention.
        optimizer_slots: float32 values that the optimizer keeps for each trainable parameter.
        launches: operations of a forward pass in float32 with plain attention, each a kernel or more on a GPU.
    """

    parameters: int
    encoder_parameters: int
    trainable: int
    flops_per_image: float
    activation_bytes: int
    optimizer_slots: int
    averaged: bool = False
    launches: int = 0

    def memory_gib(self, *, world_size: int, zero_stage: int) -> float:
        """Returns an approximate upper bound of one rank's memory in GiB: weights, gradients, states, activations."""
        lasting, gradients = self._states(world_size, zero_stage)
        return (lasting + gradients + self.activation_bytes) / 2**30

    def least_gib(self, *, world_size: int, zero_stage: int, kept_bytes: int) -> float:
        """Returns a lower bound of one rank's memory in GiB.

        It counts gradients or activations (from the function `kept_bytes`), whichever is larger: the
        backward pass frees activations while it creates gradients.
        """
        lasting, gradients = self._states(world_size, zero_stage)
        return (lasting + max(gradients, kept_bytes)) / 2**30

    def _states(self, world_size: int, zero_stage: int) -> tuple[float, float]:
        """Returns one rank's persistent bytes (weights, optimizer state) and its bytes of gradients."""
        rank_part = 1 / world_size
        # From ZeRO 1 on, a rank also keeps a flat float32 copy of its share of the parameters.
        slots = 4 * (self.optimizer_slots + (zero_stage > 0)) * (rank_part if zero_stage else 1)
        whole: float = 4 * self.parameters * (1 + self.averaged)
        if zero_stage == 3:
            # A rank keeps its own shard, and gathered parameters up to a limit.
            whole += 4 * (
                rank_part * self.parameters + min(self.parameters, _ZERO_3_GATHERED) - self.parameters
            )
        exchanged = 4 * min(self.trainable, 2 * ZERO_BUCKET) if zero_stage else 0
        gradients = 4 * self.trainable * (rank_part if zero_stage >= 2 else 1) + exchanged
        return whole + slots * self.trainable, gradients

    def describe_compute(self, images: int) -> str:
        """Returns a phrase with the cost of one image and of all `images` that a run will see."""
        total = self.flops_per_image * images / 1e15
        return (
            f"{self.flops_per_image / 1e9:.3f} GFLOP per image and step (3 x forward), "
            f"{f'{total:,.0f}' if total >= 100 else f'{total:.3g}'} PFLOP in all"
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk."""
        return 4 * ((1 + self.averaged) * self.parameters + self.optimizer_slots * self.trainable)


@dataclass(frozen=True)
class MetaStep:
    """A step of an objective on one micro-batch, on tensors without content.

    Attributes:
        build: builds the objective.
        image_shape: (C, H, W) of the raw images, which stay on the device throughout the step.
        activation_checkpointing: whether each block keeps only its input, and the backward pass recomputes one block
            at a time.
        dtype: type of the raw images.
    """

    build: Callable[[], Task]
    image_shape: tuple[int, int, int]
    batch_size_per_device: int
    activation_checkpointing: bool = False
    dtype: torch.dtype = torch.uint8

    def estimate(self, *, optimizer_slots: int = 2, averaged: bool = False) -> Estimate:
        """Measures the costs by building and running the objective on the meta device."""
        # The counter counts the matrix products of plain attention only.
        model = self._model(fused_attention=False)
        images = self._images(torch.device("meta"))
        activations = _Activations(model, recomputed=self.activation_checkpointing)
        activations.keep(images)
        with FlopCounterMode(display=False) as counter, _Launches() as launches:
            activations.run(model, images)
        parameters = list(model.parameters())
        return Estimate(
            parameters=sum(p.numel() for p in parameters),
            encoder_parameters=sum(p.numel() for p in getattr(model, "encoder", model).parameters()),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            flops_per_image=3 * counter.get_total_flops() / self.batch_size_per_device,
            activation_bytes=activations.bytes,
            optimizer_slots=optimizer_slots,
            averaged=averaged,
            launches=launches.count,
        )

    def kept_bytes(self, precision: Precision, *, fused_attention: bool) -> int:
        """Measures the least bytes that autograd keeps in an eager step, including autocast's copies of weights.

        It uses fake CPU tensors: there autocast and fused attention keep the same tensors as on a GPU
        (queries, keys, values, the result, one sum per row).
        """
        model = self._model(fused_attention=fused_attention)
        with FakeTensorMode(), autocast(torch.device("cpu"), precision):
            # Each module once: joint objectives share the encoder, and a fake parameter may not be replaced twice.
            for module in model.modules():
                module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype), recurse=False)
            activations = _Activations(model, recomputed=self.activation_checkpointing)
            activations.run(model, self._images(torch.device("cpu")))
        return activations.bytes

    def _model(self, *, fused_attention: bool) -> Task:
        with torch.device("meta"):
            model = self.build()
        model.to("meta")  # tables that NumPy computed are still on the CPU
        set_fused_attention(model, fused_attention)
        return model

    def _images(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.batch_size_per_device, *self.image_shape, dtype=self.dtype, device=device)


class _Launches(TorchDispatchMode):
    """Counts operations; views launch nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class _Activations:
    """Counts the bytes of the storages that autograd keeps, each once, without those of parameters."""

    def __init__(self, model: Task, *, recomputed: bool) -> None:
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: dict[int, int] = {}
        # Storages that the recomputation of the current block keeps; None outside of blocks.
        self._inside: dict[int, int] | None = None
        self._largest_block = 0
        for module in model.modules() if recomputed else ():
            if isinstance(module, BLOCKS):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            kept = self._kept if self._inside is None else self._inside
            kept[storage._cdata] = storage.nbytes()
        return tensor

    def run(self, model: Task, images: torch.Tensor) -> None:
        """Runs a forward pass, and counts what it keeps for the backward pass."""
        index = torch.empty(len(images), dtype=torch.int64, device=images.device)
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda t: t):
            kept = model(Batch(images, index, SampleKeys(0, 0, index)))
        del kept

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


# Dense 16-bit tensor peaks in FLOP/s by the words of a device's name, more specific names first. Source: NVIDIA's
# datasheets, most of which state the peak with sparsity, twice as high.
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
    # No bf16; peak of fp16.
    ("V100 PCIe", 112e12),
    ("V100", 125e12),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the device's peak FLOP/s for bf16 and fp16; None if unknown (CPUs, fp32, slices of a GPU)."""
    if device.type != "cuda" or precision == "fp32":
        return None
    words = set(re.findall(r"\w+", torch.cuda.get_device_name(device).upper()))
    if "MIG" in words:
        return None
    return next((peak for model, peak in _PEAKS if words.issuperset(model.upper().split())), None)
