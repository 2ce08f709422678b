"""The whole state of training, independent of engine, ZeRO stage and world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mae_vit.data.order.skipped_steps import Skipped
from mae_vit.training.engines.staging import to_host
from mae_vit.training.optim.loss_scale import LossScale


@dataclass(frozen=True)
class LossHistory:
    """What a run has met so far; checkpoints keep it, so that one that resumes decides alike.

    Attributes:
        skipped: steps of the data order that are left out.
        losses: of the latest good steps.
        streak: how many steps in a row have just leapt.
    """

    skipped: Skipped = ()
    losses: tuple[float, ...] = ()
    streak: int = 0


@dataclass(frozen=True)
class BestWeights:
    """The weights that scored best on held-out images so far.

    Attributes:
        step: optimizer steps that they had seen.
        score: on held-out images; larger is better.
        tensors: parameters and persistent buffers by name, on the CPU; empty on all ranks but 0.
    """

    step: int
    score: float
    tensors: dict[str, Tensor]


@dataclass
class TrainState:
    """All that an optimizer step reads and writes, whole, on the CPU, by parameter name.

    What an engine gathers has its tensors on rank 0; on the others there are none.

    Attributes:
        parameters: every parameter of the objective, frozen ones too.
        optimizer_states: what the optimizer keeps for trainable parameters, by the optimizer's name
            for it (`exp_avg`, `exp_avg_sq`; `momentum_buffer`), then by parameter.
        optimizer_step: updates the optimizer has made; skipped steps are none.
        loss_scale: of fp16; None in other precisions.
        buffers: what layers keep beside parameters (statistics of BatchNorm), by name.
        best: of runs that choose among their epochs; None in others, and at first.
        average: the moving average of the weights, by name; empty where there is none.
        course: what the run has met so far.
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
        """Whether parameters and optimizer states are: a finite loss says nothing of the update after it."""
        return all(
            bool(tensor.isfinite().all())
            for tensors in (self.parameters, *self.optimizer_states.values())
            for tensor in tensors.values()
        )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns, by name, the buffers that belong to a model's state; the rest are constants."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies a whole model's parameters and persistent buffers to the CPU."""
    parameters = {name: to_host(p) for name, p in model.named_parameters()}
    return parameters | {name: to_host(buffer, None) for name, buffer in persistent_buffers(model).items()}


def slot_tensors(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter], slot: str
) -> Iterator[tuple[str, Tensor]]:
    """Names one slot's tensors where this process's optimizer holds all of it; zeros before the first step."""
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
    """Puts slots back where this process's optimizer holds all of them."""
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
