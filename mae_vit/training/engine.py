"""How a step is taken: the interface of engines, and the plain torch engine.

Precision bf16 means fp32 parameters with autocast, as in the official MAE code.
The autocast wraps the objective inside the engine, so both engines compute the
same thing and gradients are reduced in fp32 (DeepSpeed's own `torch_autocast`
section would reduce them in bf16).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mae_vit.batch import Batch
from mae_vit.encoder import set_fused_attention
from mae_vit.objectives.base import Objective, ObjectiveOutput
from mae_vit.training.distributed import Ranks
from mae_vit.training.param_groups import decay_groups

Precision = Literal["fp32", "bf16"]


@dataclass
class TrainState:
    """All that an optimizer step reads and writes, whole, on the CPU, by parameter name.

    Attributes:
        parameters: every parameter of the objective, frozen ones too.
        exp_avg: first moments of trainable parameters.
        exp_avg_sq: second moments.
        optimizer_step: updates the optimizer has made (AdamW's bias correction).
    """

    parameters: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    optimizer_step: int


@dataclass(frozen=True)
class StepOptions:
    """What engines need to know beyond the model.

    Attributes:
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: of parameters that decay.
        clip_grad: largest global gradient norm; None for no clipping.
        precision: of the forward and backward pass.
        batch_size_per_device: images per micro-batch.
        accumulation: micro-batches per step.
        zero_stage: DeepSpeed's ZeRO stage.
        compile: fuse the objective's operations by torch.compile; costs a minute at the
            start, on a CPU it needs a C++ compiler.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float | None
    precision: Precision
    batch_size_per_device: int
    accumulation: int
    zero_stage: int = 0
    compile: bool = False


class Autocast(nn.Module):
    """Runs an objective in the run's precision."""

    def __init__(self, objective: Objective, device: torch.device, precision: Precision) -> None:
        """Wraps `objective`."""
        super().__init__()
        self.objective = objective
        self._device_type = device.type
        self._enabled = precision == "bf16"

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the loss under autocast; losses themselves are float32."""
        with self.context():
            return self.objective(batch)

    def context(self) -> torch.autocast:
        """The autocast of this run's precision, for evaluation."""
        return torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._enabled)


class Engine(ABC):
    """One way of taking optimizer steps; all collective calls are made by all ranks."""

    def __init__(
        self, objective: Objective, options: StepOptions, ranks: Ranks, device: torch.device
    ) -> None:
        """Moves `objective` to `device` and prepares to train it."""
        self.objective = objective.to(device)
        self.options = options
        self.ranks = ranks
        self.device = device
        # Measured on CPUs with AVX-512 at MAE's sequence lengths: PyTorch's fused
        # attention takes twice the time of plain attention's step in bf16, 10 % more in
        # fp32 (torch 2.15, benchmarks/step.py).
        set_fused_attention(objective, fused=device.type != "cpu")
        if options.compile:
            # In place, so that names in state dicts stay. Shapes never change in a run.
            self.objective.compile(dynamic=False)
        self.module = Autocast(self.objective, device, options.precision)

    @abstractmethod
    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the loss of a micro-batch."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of one micro-batch, weighted by 1 / accumulation."""

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Clips, updates and clears gradients; returns the global norm before clipping."""

    @abstractmethod
    def gather(self) -> TrainState:
        """Collects the whole state; collective, the result is meaningful on rank 0."""

    @abstractmethod
    def restore(self, state: TrainState) -> None:
        """Puts a gathered state back, whatever engine, stage or world size wrote it."""

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Adds a tensor over ranks, in place."""
        if self.ranks.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def make_optimizer(self) -> torch.optim.AdamW:
        """AdamW over the decay groups; the fused kernel updates bit for bit as a plain loop using it."""
        groups: list[dict[str, Any]] = decay_groups(self.objective, self.options.weight_decay)
        for group in groups:
            del group["names"]
        return torch.optim.AdamW(groups, lr=0.0, betas=self.options.betas, eps=self.options.eps, fused=True)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {name: p for name, p in self.objective.named_parameters() if p.requires_grad}

    def load_parameters(self, parameters: dict[str, Tensor]) -> None:
        """Copies parameters by name; names and shapes were checked before."""
        with torch.no_grad():
            for name, parameter in self.objective.named_parameters():
                parameter.copy_(parameters[name])

    def copy_parameters(self) -> dict[str, Tensor]:
        """Copies parameters to the CPU, contiguous, in float32."""
        return {name: _to_host(p) for name, p in self.objective.named_parameters()}


class TorchEngine(Engine):
    """One process, plain PyTorch: for small runs, and the oracle of the DeepSpeed engine."""

    def __init__(
        self, objective: Objective, options: StepOptions, ranks: Ranks, device: torch.device
    ) -> None:
        """Prepares a single-process run."""
        super().__init__(objective, options, ranks, device)
        assert ranks.world_size == 1
        assert options.zero_stage == 0
        self._optimizer = self.make_optimizer()

    def forward(self, batch: Batch) -> ObjectiveOutput:  # noqa: D102
        return self.module(batch)

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        (loss / self.options.accumulation).backward()

    def step(self, lr: float) -> Tensor:  # noqa: D102
        norm = clip_gradients(self.trainable().values(), self.options.clip_grad)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self) -> TrainState:  # noqa: D102
        return gather_local(self, self._optimizer)

    def restore(self, state: TrainState) -> None:  # noqa: D102
        restore_local(self, self._optimizer, state)


def clip_gradients(parameters: Iterable[nn.Parameter], clip_grad: float | None) -> Tensor:
    """Returns the global gradient norm before clipping, and clips where asked."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if clip_grad is None:
        return nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    return nn.utils.clip_grad_norm_(trained, clip_grad)


def gather_local(engine: Engine, optimizer: torch.optim.Optimizer) -> TrainState:
    """Collects the state where this process's optimizer holds all of it."""
    moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    step = 0
    for name, parameter in engine.trainable().items():
        state = optimizer.state.get(parameter, {})
        for key, values in moments.items():
            values[name] = _to_host(state[key] if state else torch.zeros_like(parameter))
        step = int(state["step"]) if state else 0
    return TrainState(engine.copy_parameters(), moments["exp_avg"], moments["exp_avg_sq"], step)


def restore_local(engine: Engine, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    """Puts a state back where this process's optimizer holds all of it."""
    engine.load_parameters(state.parameters)
    optimizer.state.clear()
    if state.optimizer_step == 0:
        return
    for name, parameter in engine.trainable().items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.optimizer_step), device=engine.device),
            "exp_avg": state.exp_avg[name].to(engine.device).clone(),
            "exp_avg_sq": state.exp_avg_sq[name].to(engine.device).clone(),
        }


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
