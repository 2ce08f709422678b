"""The plain torch engine. Tests compare the DeepSpeed engine with it."""

from __future__ import annotations

import torch
from torch import Tensor

from mae_vit.core.batch import Batch
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import Engine, StepOptions, StepResult
from mae_vit.training.engines.data_parallel import DataParallel
from mae_vit.training.engines.state import TrainState
from mae_vit.training.optim.optimizers import make_optimizer


class TorchEngine(Engine):
    """Plain PyTorch. Every rank has a whole model; several ranks use DistributedDataParallel."""

    def __init__(self, objective: Task, options: StepOptions, ranks: Ranks, device: torch.device) -> None:
        """Prepares to train `objective`. For several ranks the process group must exist."""
        super().__init__(objective, options, ranks, device)
        assert options.zero_stage == 0
        self._parallel = DataParallel(self.module) if ranks.world_size > 1 else None
        self._optimizer = make_optimizer(self.objective, options.optimizer)
        self._micro_batches = 0

    def forward(self, batch: Batch) -> ObjectiveOutput:  # noqa: D102
        if self._parallel is not None:
            # Gradients add up locally; only the last micro-batch of a step sends them.
            return self._parallel.forward(batch, reduces=self._micro_batches == self.options.accumulation - 1)
        return self.module(batch)

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        (self.scale_loss(loss) / self.options.accumulation).backward()
        self._micro_batches += 1

    def step(self, lr: float) -> StepResult:  # noqa: D102
        self._micro_batches = 0
        self.reduce_buffers()
        result = self.unscale_and_clip()
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if not result.skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self.update_ema(result)

    def gather(self) -> TrainState:  # noqa: D102
        return self.gather_local(self._optimizer)

    def restore(self, state: TrainState) -> None:  # noqa: D102
        self.restore_local(self._optimizer, state)
