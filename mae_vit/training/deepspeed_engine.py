"""The engine of pretraining: DeepSpeed, ZeRO 0-1, on CPU (gloo) or GPU (nccl).

The only file that imports DeepSpeed. Scheduler, loader, gradient norm and
checkpoints are ours; DeepSpeed reduces gradients and shards optimizer state.
"""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor

from mae_vit.batch import Batch
from mae_vit.objectives.base import Objective, ObjectiveOutput
from mae_vit.training.distributed import Ranks
from mae_vit.training.engine import (
    Engine,
    StepOptions,
    TrainState,
    clip_gradients,
    gather_local,
    restore_local,
)


def init_process_group(device: torch.device) -> None:
    """Connects all ranks; every rank calls it once."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed would compile a C++ shared-memory op here (30 to 70 s, needs g++ and
    # ninja), which only its inference uses. An empty table of compatible ops makes
    # it go on without; drop this line when the build becomes optional.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)


class DeepSpeedEngine(Engine):
    """Steps through `deepspeed.initialize`."""

    def __init__(
        self, objective: Objective, options: StepOptions, ranks: Ranks, device: torch.device
    ) -> None:
        """Wraps `objective`; the process group must exist."""
        super().__init__(objective, options, ranks, device)
        self._optimizer = self.make_optimizer()
        self._engine, self._wrapped, _, _ = deepspeed.initialize(
            model=self.module,
            optimizer=self._optimizer,
            config=deepspeed_config(options),
            dist_init_required=False,
        )
        if options.zero_stage:
            self._make_moments()

    def forward(self, batch: Batch) -> ObjectiveOutput:  # noqa: D102
        return self._engine(batch)

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def step(self, lr: float) -> Tensor:  # noqa: D102
        for group in self._wrapped.param_groups:
            group["lr"] = lr
        if self.options.zero_stage:
            self._engine.step()
            # DeepSpeed reports a skipped non-finite step as a norm of infinity.
            return torch.as_tensor(self._engine.get_global_grad_norm(), device=self.device)
        # At ZeRO 0 gradients are reduced by now, and DeepSpeed keeps no norm.
        norm = clip_gradients(self.trainable().values(), self.options.clip_grad)
        self._engine.step()
        return norm

    def gather(self) -> TrainState:  # noqa: D102
        # safe_get_* returns None, and safe_set_* does nothing, at ZeRO 0.
        if not self.options.zero_stage:
            return gather_local(self, self._optimizer)
        step = int(self._optimizer.state[self._flat_partitions()[0]]["step"])
        state = TrainState(self.copy_parameters(), {}, {}, step)
        for name, parameter in self.trainable().items():
            for key, values in (("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
                full = safe_get_full_optimizer_state(parameter, key)
                values[name] = full.detach().to("cpu", torch.float32, copy=True).contiguous()
        return state

    def restore(self, state: TrainState) -> None:  # noqa: D102
        if not self.options.zero_stage:
            restore_local(self, self._optimizer, state)
            return
        self.load_parameters(state.parameters)
        for flat in self._flat_partitions():
            # AdamW's step counter is reachable by none of DeepSpeed's safe_* calls.
            self._optimizer.state[flat]["step"].fill_(float(state.optimizer_step))
        for name, parameter in self.trainable().items():
            safe_set_full_fp32_param(parameter, state.parameters[name].to(self.device))
            safe_set_full_optimizer_state(parameter, state.exp_avg[name].to(self.device), "exp_avg")
            safe_set_full_optimizer_state(parameter, state.exp_avg_sq[name].to(self.device), "exp_avg_sq")

    def _flat_partitions(self) -> list[Tensor]:
        """ZeRO's own parameters: this rank's flat part of each group."""
        return [group["params"][0] for group in self._optimizer.param_groups]

    def _make_moments(self) -> None:
        """Creates the state that AdamW would make at its first step, and links it to parameters.

        DeepSpeed 0.19 links all groups once the first group has stepped, when the others
        have no state yet: with several groups, safe_get_full_optimizer_state then fails
        for all but the first. With the state there beforehand the link is complete.
        """
        for flat in self._flat_partitions():
            self._optimizer.state[flat] = {
                "step": torch.zeros((), device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
        self._wrapped._lazy_init_hp_params_optimizer_state()


def deepspeed_config(options: StepOptions) -> dict[str, Any]:
    """Generates DeepSpeed's dictionary from ours."""
    return {
        "train_micro_batch_size_per_gpu": options.batch_size_per_device,
        "gradient_accumulation_steps": options.accumulation,
        # At ZeRO 0 we clip ourselves, to know the norm.
        "gradient_clipping": (options.clip_grad or 0.0) if options.zero_stage else 0.0,
        "zero_optimization": {"stage": options.zero_stage},
        # Never: progress is reported by our own loop.
        "steps_per_print": None,
    }
