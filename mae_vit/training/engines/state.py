"""The state of training, independent of engine, ZeRO stage and world size, and its copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mae_vit.data.order.order import Skipped


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16, in which gradients below 6e-8 would vanish.

    The loss is multiplied by `scale`, and gradients are divided by it. If gradients overflow, the
    step is skipped and the scale is halved. After `growth_interval` good steps in a row the scale
    doubles. It is always a power of two, so scaling never rounds. The defaults are those of
    torch.amp.GradScaler, which supports neither sharded gradients nor a lowest scale.

    Attributes:
        scale: the factor, a power of two from `LOWEST` to `HIGHEST`.
        good_steps: steps since the scale last changed.
        skipped_steps: steps skipped in the whole run.
    """

    scale: float = 65536.0
    good_steps: int = 0
    skipped_steps: int = 0
    growth_interval: int = 2000

    # If gradients overflow without scaling, a lower scale does not help.
    LOWEST: ClassVar[float] = 1.0
    # A larger scale gains nothing: 2^24 lifts the smallest float16 to 1.
    HIGHEST: ClassVar[float] = 2.0**24

    def update(self, *, overflow: bool) -> bool:
        """Updates the scale after a backward pass; returns whether to skip the step.

        An overflow at the lowest scale is not skipped. It is a bad step, which the guard treats as in
        any other precision.
        """
        if overflow:
            if self.scale <= self.LOWEST:
                return False
            self.scale = max(self.LOWEST, self.scale / 2)
            self.good_steps = 0
            self.skipped_steps += 1
            return True
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale = min(self.HIGHEST, self.scale * 2)
            self.good_steps = 0
        return False


def to_host(tensor: Tensor, *, queued: bool = False) -> Tensor:
    """Copies a tensor to the CPU, contiguous.

    If `queued`, a GPU copies it in its current stream, before any later change of the tensor, to page-locked memory,
    which torch keeps for the next copy; it is valid once the stream was waited for.
    """
    return tensor.detach().to("cpu", copy=True, non_blocking=queued, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class LossHistory:
    """The loss history of a run. Checkpoints store it, so a resumed run makes the same decisions.

    Attributes:
        skipped: windows of data steps that the run skips.
        losses: losses of the latest good steps, oldest first.
        streak: number of consecutive latest steps whose loss jumped.
    """

    skipped: Skipped = ()
    losses: tuple[float, ...] = ()
    streak: int = 0


@dataclass(frozen=True)
class BestWeights:
    """The weights that scored best on held-out images so far.

    Attributes:
        score: score on held-out images; larger is better.
        tensors: parameters and persistent buffers by name, on the CPU; empty on ranks other than 0.
    """

    step: int
    score: float
    tensors: dict[str, Tensor]


@dataclass
class TrainState:
    """Everything that an optimizer step reads and writes: whole tensors on the CPU, by parameter name.

    After `Engine.gather` only rank 0 has the tensors; on other ranks the dictionaries are empty.

    Attributes:
        parameters: all parameters of the objective, including frozen ones.
        optimizer_states: the optimizer's tensors by slot (`exp_avg`, `exp_avg_sq`;
            `momentum_buffer`), then by trainable parameter; a parameter may lack a slot.
        optimizer_step: updates that the optimizer has made; skipped steps do not count.
        loss_scale: the loss scale of fp16; None in other precisions.
        buffers: persistent buffers of layers (statistics of BatchNorm), by name.
        best: the best weights so far; None before the first score and in runs that keep the last weights.
        average: the moving average of the weights, by name; empty without `ema_decay`.
        course: the loss history of the run.
    """

    parameters: dict[str, Tensor]
    optimizer_states: dict[str, dict[str, Tensor]]
    optimizer_step: int
    loss_scale: LossScale | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    best: BestWeights | None = None
    average: dict[str, Tensor] = field(default_factory=dict)
    course: LossHistory = field(default_factory=LossHistory)

    def is_finite(self) -> bool:
        """Returns whether parameters, buffers and slots are finite; the loss precedes the update and cannot tell."""
        return all(
            bool(tensor.isfinite().all())
            for tensors in (self.parameters, self.buffers, *self.optimizer_states.values())
            for tensor in tensors.values()
        )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that `state_dict` includes, by name. All other buffers are constants."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def put_back(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Copies kept values to the persistent buffers of the model."""
    for name, buffer in persistent_buffers(model).items():
        buffer.copy_(kept[name])


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's parameters and persistent buffers by name, each once."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and persistent buffers to the CPU. This process must hold them whole."""
    return {name: to_host(tensor) for name, tensor in tensors_of(model).items()}


class EMA:
    """Computes average = decay * average + (1 - decay) * weights at each update.

    Early updates use a lower decay, (1 + n) / (10 + n) at the n-th update, as in TensorFlow. Otherwise
    the initial weights would still dominate after 1 / (1 - decay) updates. BatchNorm's statistics are
    averaged too; integer buffers are copied.

    Attributes:
        tensors: the average by parameter name, on the model's device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Starts at the weights of `model`, which this rank must hold whole; `decay` is the largest, 0 to 1."""
        self._model, self._decay = model, decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(self._model).items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Updates the average with the model's weights."""
        now = tensors_of(self._model)
        lerp = get_ema_multi_avg_fn(min(self._decay, (1 + updates) / (10 + updates)))
        averaged = [name for name, tensor in now.items() if tensor.is_floating_point()]
        lerp([self.tensors[name] for name in averaged], [now[name].detach() for name in averaged], 0)
        for name in now.keys() - set(averaged):
            self.tensors[name].copy_(now[name])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swaps the average into the model. Neither may be updated within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores the average from a saved copy."""
        for name, tensor in self.tensors.items():
            tensor.copy_(saved[name])

    def _swap(self) -> None:
        for name, tensor in tensors_of(self._model).items():
            tensor.data, self.tensors[name] = self.tensors[name], tensor.data
