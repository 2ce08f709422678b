"""The state of training, independent of engine, ZeRO stage and world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mae_vit.data.order.order import Skipped
from mae_vit.training.engines.staging import to_host
from mae_vit.training.optim.loss_scale import LossScale


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
        step: optimizer steps done when they were stored.
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
            `momentum_buffer`), then by trainable parameter.
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
        """Returns whether parameters and optimizer states are finite; the loss precedes the update and cannot tell."""
        return all(
            bool(tensor.isfinite().all())
            for tensors in (self.parameters, *self.optimizer_states.values())
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


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and persistent buffers to the CPU. This process must hold them whole."""
    parameters = {name: to_host(p) for name, p in model.named_parameters()}
    return parameters | {name: to_host(buffer, None) for name, buffer in persistent_buffers(model).items()}


def slot_tensors(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter], slot: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields (parameter name, tensor) of one slot, which this process must hold whole; zeros before the first step."""
    for name, parameter in trainable.items():
        kept = optimizer.state.get(parameter, {}).get(slot)
        yield name, torch.zeros_like(parameter) if kept is None else kept


def restore_slots(
    optimizer: torch.optim.Optimizer,
    trainable: Mapping[str, nn.Parameter],
    state: TrainState,
    *,
    counts_updates: bool,
) -> None:
    """Restores all slots of `state`. This process's optimizer must hold them whole."""
    optimizer.state.clear()
    if state.optimizer_step == 0:
        return
    for name, parameter in trainable.items():
        kept = {
            slot: values[name].to(parameter.device).clone() for slot, values in state.optimizer_states.items()
        }
        if counts_updates:
            kept["step"] = torch.tensor(float(state.optimizer_step), device=parameter.device)
        optimizer.state[parameter] = kept
