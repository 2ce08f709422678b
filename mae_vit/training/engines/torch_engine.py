"""The plain torch engine. Tests compare the DeepSpeed engine with it."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mae_vit.core.batch import Batch
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import Engine, StepOptions, StepResult
from mae_vit.training.engines.state import persistent_buffers, put_back

# The engine averages the layers' statistics itself, after each step. torch 2.15 renamed the option.
_NO_SYNC_OF_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DataParallel(nn.Module):
    """Runs a module with equal parameters on all ranks; the backward pass makes the gradients equal."""

    def __init__(self, module: nn.Module) -> None:
        """Wraps `module`, which computes the loss of a batch. The process group must exist."""
        super().__init__()
        self._ddp = DistributedDataParallel(
            module,
            **{_NO_SYNC_OF_BUFFERS: False},  # type: ignore[arg-type]
            # Gradients share memory with the buckets, except while micro-batches before the last add up.
            gradient_as_bucket_view=True,
            # Every step uses the same parameters, so an unused one stays unused.
            static_graph=True,
        )
        self._laid_out = False

    def forward(self, batch: Batch, *, reduces: bool) -> ObjectiveOutput:
        """Computes the loss of a micro-batch; if `reduces`, its backward pass averages gradients over ranks."""
        if not self._laid_out:
            self._lay_out(batch)
        if reduces:
            return self._ddp(batch)
        with self._ddp.no_sync():
            return self._ddp(batch)

    def _lay_out(self, batch: Batch) -> None:
        """Runs two backward passes and discards them, so that the first step reduces like all others.

        DistributedDataParallel starts with one bucket and makes its final buckets after two backward
        passes, in the order of the gradients. The position in a bucket changes the rounding of a sum over
        ranks, so a resumed run would differ from an uninterrupted one. Also, with `static_graph` the
        first pass must not skip the reduction.
        """
        self._laid_out = True
        kept = {name: buffer.clone() for name, buffer in persistent_buffers(self._ddp.module).items()}
        devices = [batch.images.device] if batch.images.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            for _ in range(2):
                self._ddp(batch).loss.backward()
                for parameter in self._ddp.module.parameters():
                    parameter.grad = None
        put_back(self._ddp.module, kept)


class TorchEngine(Engine):
    """Plain PyTorch. Every rank has a whole model; several ranks use DistributedDataParallel."""

    def __init__(self, objective: Task, options: StepOptions, ranks: Ranks, device: torch.device) -> None:
        """Prepares to train `objective`. With several ranks the process group must exist."""
        super().__init__(objective, options, ranks, device)
        self._parallel = DataParallel(self.module) if ranks.world_size > 1 else None
        self._micro_batches = 0

    def forward(self, batch: Batch) -> ObjectiveOutput:  # noqa: D102
        if self._parallel is not None:
            # Gradients add up locally; only the last micro-batch of a step reduces them.
            return self._parallel(batch, reduces=self._micro_batches == self.options.accumulation - 1)
        if not self.options.cuda_graphs:
            return self.module(batch)
        # The graphs may reuse their memory now: the last step's gradients are cleared, its outputs were copied below.
        torch.compiler.cudagraph_mark_step_begin()
        output = self.module(batch)
        # The next replay overwrites these tensors, which the caller may read later.
        values = {name: (total.clone(), count.clone()) for name, (total, count) in output.values.items()}
        return ObjectiveOutput(output.loss.clone(), values)

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        (self.scale_loss(loss) / self.options.accumulation).backward()
        self._micro_batches += 1

    def _update(self) -> StepResult:
        self._micro_batches = 0
        result = self.unscale_and_clip()
        if not result.skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return result
