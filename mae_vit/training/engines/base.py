"""The interface of engines: how an optimizer step is computed.

With bf16 and fp16, parameters stay fp32 and the forward pass runs under autocast, as in the
official MAE code. Our own autocast and loss scale (`mae_vit.training.engines.state.LossScale`)
make both engines compute the same values and reduce gradients in fp32. (DeepSpeed's own
`torch_autocast` section would reduce them in bf16.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.models.attention import choose_attention
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.runtime.process_group import leave
from mae_vit.runtime.ranks import Ranks, sum_over_ranks
from mae_vit.training.engines.compiled_cache import keep_compiled
from mae_vit.training.engines.cost import BLOCKS
from mae_vit.training.engines.precision import Autocast, Precision
from mae_vit.training.engines.state import EMA, LossScale, TrainState, persistent_buffers, put_back, to_host
from mae_vit.training.optim import OptimizerOptions, make_optimizer

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class StepOptions:
    """Options of an engine.

    Attributes:
        clip_grad: largest global gradient norm; None for no clipping.
        zero_keeps_whole_below: ZeRO 3 does not shard parameters with fewer elements (DeepSpeed's default).
        compile: apply torch.compile to the objective. This takes a minute; on a CPU it needs a C++ compiler.
        cuda_graphs: launch the kernels of a compiled pass together; only for one rank and micro-batch on the torch
            engine.
        attention: kernel of attention (`train.attention`).
        activation_checkpointing: recompute each block's activations in the backward pass.
        ema_decay: decay of the moving average of the weights (`mae_vit.training.engines.state`); None for no average.
    """

    optimizer: OptimizerOptions
    clip_grad: float | None
    precision: Precision
    batch_size_per_device: int
    accumulation: int
    zero_stage: int = 0
    zero_keeps_whole_below: int = 100_000
    compile: bool = False
    cuda_graphs: bool = False
    attention: str = "auto"
    activation_checkpointing: bool = False
    ema_decay: float | None = None


class StepResult(NamedTuple):
    """The global gradient norm before clipping, without the loss scale; and whether fp16 skipped the update."""

    grad_norm: Tensor
    skipped: bool = False


class Engine(ABC):
    """Computes optimizer steps. Every rank must make every collective call.

    Attributes:
        trainable: parameters that require gradients, by name.
        loss_scale: the loss scale of fp16; None in other precisions.
        updates: optimizer updates of the whole run; skipped steps do not count.
        average: moving average of the weights; None without `ema_decay`.
    """

    def __init__(self, objective: Task, options: StepOptions, ranks: Ranks, device: torch.device) -> None:
        self.objective = objective.to(device)
        self.options = options
        self.ranks = ranks
        self.device = device
        self.loss_scale = LossScale() if options.precision == "fp16" else None
        self.updates = 0
        self._keep_buffers()
        # Cached: walking `named_parameters()` in every step costs as much as clipping.
        self.trainable = {name: p for name, p in self.objective.named_parameters() if p.requires_grad}
        self.average = None if options.ema_decay is None else EMA(self.objective, options.ema_decay)
        if device.type == "cuda" and options.precision == "fp32" and options.attention in ("cudnn", "flash"):
            raise InputError(f"train.attention={options.attention} needs train.precision=bf16 or fp16")
        choose_attention(objective, device, options.attention)
        if options.activation_checkpointing:
            recompute_blocks(objective)
        if options.compile:
            size, mode = options.batch_size_per_device, "reduce-overhead" if options.cuda_graphs else None
            keep_compiled(objective, device, size, options.precision, mode)
            # In place: the wrapper that `torch.compile` returns changes the names in state dicts.
            # Shapes never change in a run, hence dynamic=False.
            self.objective.compile(dynamic=False, mode=mode)
        self.module = Autocast(self.objective, device, options.precision)
        products = torch.bfloat16 if options.precision == "bf16" else torch.float32
        self._optimizer = make_optimizer(self.objective, options.optimizer, products=products)

    @abstractmethod
    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the loss of a micro-batch."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of one micro-batch, weighted by 1 / accumulation."""

    def step(self, lr: float) -> StepResult:
        """Clips, updates and clears gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.reduce_buffers()
        result = self._update()
        if result.skipped:
            put_back(self.objective, self._kept)
        elif self._kept:
            self._keep_buffers()
        if self.average is not None and not result.skipped:
            self.average.update(self.updates)
        return result

    @abstractmethod
    def _update(self) -> StepResult:
        """Takes a step at the rates of the optimizer's groups."""

    def _keep_buffers(self) -> None:
        # In fp16 an overflow would stay in the statistics of BatchNorm for good.
        kept = {} if self.loss_scale is None else persistent_buffers(self.objective)
        self._kept = {name: buffer.clone() for name, buffer in kept.items()}

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Gives `objective` whole weights for evaluation and export: the moving average if there is one; collective."""
        with nullcontext() if self.average is None else self.average.swapped_in():
            yield

    def close(self) -> None:
        """Leaves the process group, if there is one. No collective call may follow."""
        leave()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Adds a tensor over ranks, in place."""
        return sum_over_ranks(values, self.ranks)

    def reduce_buffers(self) -> None:
        """Averages the layers' statistics (BatchNorm) over ranks.

        Called in every step, so the statistics do not depend on when a run was saved.
        """
        if self.ranks.world_size == 1:
            return
        kept = [b for b in persistent_buffers(self.objective).values() if b.is_floating_point()]
        if not kept:
            return
        mean = self.all_reduce_sum(torch.cat([b.flatten() for b in kept])) / self.ranks.world_size
        for buffer, part in zip(kept, mean.split([b.numel() for b in kept]), strict=True):
            buffer.copy_(part.view_as(buffer))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Applies the loss scale, if there is one."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def unscale_and_clip(self) -> StepResult:
        """Divides the gradients by the loss scale and clips them. This process must hold them whole."""
        trained = [p for p in self.trainable.values() if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        if self.loss_scale is not None:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.scale)
        if self.options.clip_grad is None:
            return self.update_loss_scale(nn.utils.get_total_norm(gradients))
        return self.update_loss_scale(nn.utils.clip_grad_norm_(trained, self.options.clip_grad))

    def update_loss_scale(self, grad_norm: Tensor) -> StepResult:
        """Decides from the unscaled gradient norm whether fp16 skips this step; if not, counts the update.

        It waits for the device only in fp16.
        """
        skipped = self.loss_scale is not None and self.loss_scale.update(
            overflow=not bool(grad_norm.isfinite())
        )
        self.updates += not skipped
        return StepResult(grad_norm, skipped)

    def gather(self) -> TrainState:
        """Collects the whole state in rank 0's host memory, without tensors on other ranks; collective.

        An engine that shards states overrides it.
        """

        def tensors_of(slot: str) -> Iterator[tuple[str, Tensor]]:
            for name, parameter in self.trainable.items():
                kept = self._optimizer.state.get(parameter)
                if not kept:
                    yield name, torch.zeros_like(parameter)  # before the first step
                elif slot in kept:
                    yield name, kept[slot]

        slots = self.options.optimizer.optimizer_states
        return self.make_state(self.objective.named_parameters(), {slot: tensors_of(slot) for slot in slots})

    def make_state(
        self, parameters: NamedTensors, optimizer_states: Mapping[str, NamedTensors]
    ) -> TrainState:
        """Copies tensors one by one to rank 0's host memory and adds the counters."""
        queued = self.device.type == "cuda"

        def copied(tensors: NamedTensors) -> dict[str, Tensor]:
            # Every rank iterates: to produce a tensor may be collective.
            return {name: to_host(tensor, queued=queued) for name, tensor in tensors if self.ranks.rank == 0}

        state = TrainState(
            copied(parameters),
            {slot: copied(tensors) for slot, tensors in optimizer_states.items()},
            self.updates,
            None if self.loss_scale is None else replace(self.loss_scale),
            copied(persistent_buffers(self.objective).items()),
            average=copied(self.average.tensors.items()) if self.average else {},
        )
        if queued:
            torch.cuda.current_stream(self.device).synchronize()
        return state

    def restore(self, state: TrainState) -> None:
        """Restores a gathered state of any engine, ZeRO stage and world size. An engine that shards overrides it."""
        self.restore_counters(state)
        with torch.no_grad():
            for name, parameter in self.objective.named_parameters():
                parameter.copy_(state.parameters[name])
        self._optimizer.state.clear()
        for name, parameter in self.trainable.items() if state.optimizer_step else ():
            slots = state.optimizer_states.items()
            kept = {
                slot: values[name].to(parameter.device).clone() for slot, values in slots if name in values
            }
            if self.options.optimizer.counts_updates:
                kept["step"] = torch.tensor(float(state.optimizer_step), device=parameter.device)
            self._optimizer.state[parameter] = kept

    def restore_counters(self, state: TrainState) -> None:
        """Restores counters, loss scale, moving average and the layers' buffers; raises InputError if layers differ."""
        own = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.objective.named_parameters()}
        own |= {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self.objective).items()}
        saved = {name: tuple(tensor.shape) for name, tensor in (state.parameters | state.buffers).items()}
        if other := sorted(name for name, _ in own.items() ^ saved.items()):  # a plug-in may have changed
            differ = f"the network and the checkpoint differ in {other[0]}"
            raise InputError(f"{differ}; give another run.dir, or restore the plug-in")
        put_back(self.objective, state.buffers)
        self._keep_buffers()
        self.updates = state.optimizer_step
        if self.average is not None:
            self.average.restore(state.average)
        if self.loss_scale is not None and state.loss_scale is not None:
            self.loss_scale = replace(state.loss_scale)


def recompute_blocks(model: nn.Module) -> None:
    """Makes every transformer block keep only its input and recompute the rest in the backward pass, in place.

    Names and results stay the same. A block that `encoders.vit.block_for_queries` runs in parts keeps its activations.
    """
    blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]
    if not blocks:
        raise InputError(
            "train.activation_checkpointing=true has no effect without timm's transformer blocks; leave it out"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
