"""The DeepSpeed engine: ZeRO 0 to 3, on CPU (gloo) or GPU (nccl).

The only file that imports DeepSpeed. Schedule, loader, gradient norm, loss scale and checkpoints are
ours. DeepSpeed shards optimizer state (ZeRO 1), gradients (2) and parameters (3), and reduces what it shards. At
ZeRO 0 it would reduce gradients after the backward pass; `DataParallel` reduces them during it.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.models.attention import choose_attention
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.runtime.process_group import group_as_patient
from mae_vit.runtime.ranks import Ranks
from mae_vit.runtime.signals import PLACE_ON_NODE
from mae_vit.training.engines.base import Engine, StepOptions, StepResult
from mae_vit.training.engines.cost import ZERO_BUCKET
from mae_vit.training.engines.state import TrainState
from mae_vit.training.engines.torch_engine import DataParallel


def _use_process_group(device: torch.device) -> None:
    """Makes DeepSpeed use the process group that the ranks have joined."""
    if device.type == "cuda":
        # DeepSpeed takes its GPU's number from LOCAL_RANK, at ZeRO 3 throughout the run. If the launcher
        # shows each rank only its own GPU, that GPU is number 0 on every rank.
        os.environ.setdefault(PLACE_ON_NODE, os.environ.get("LOCAL_RANK", "0"))
        os.environ["LOCAL_RANK"] = str(device.index)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # An empty table of compatible ops skips the build of a C++ shared-memory op (30 to 70 s, needs g++
    # and ninja) that only DeepSpeed's inference uses. Drop this line when the build becomes optional.
    deepspeed.ops.__compatible_ops__ = {}
    # Silences ZeRO 3's warning that a `Batch` has no tensors. It needs none: no input has a gradient.
    deepspeed.runtime.zero.utils.warned = True
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


class DeepSpeedEngine(Engine):
    """Trains with the engine that `deepspeed.initialize` returns."""

    def __init__(self, objective: Task, options: StepOptions, ranks: Ranks, device: torch.device) -> None:
        """Wraps `objective`. The process group must exist."""
        _use_process_group(device)
        # DeepSpeed communicates over a clone of the process group.
        deepspeed.utils.groups._WORLD_GROUP = group_as_patient()
        # Copy the objective before DeepSpeed attaches its hooks.
        self._replica: Task | None = None
        if options.zero_stage == 3:
            self._replica = copy.deepcopy(objective).requires_grad_(False)
            _free(self._replica)
        super().__init__(objective, options, ranks, device)
        if self._replica is not None:
            choose_attention(self._replica.to(device), device, options.attention)
        trainable = sum(p.numel() for p in self.trainable.values())
        self._reduced_by_hooks = options.zero_stage == 0 and ranks.world_size > 1
        self._engine, self._wrapped, _, _ = deepspeed.initialize(
            model=DataParallel(self.module) if self._reduced_by_hooks else self.module,
            optimizer=self._optimizer,
            config=deepspeed_config(options, trainable=trainable, device=device),
            dist_init_required=False,
        )
        if self._reduced_by_hooks:
            self._engine.enable_backward_allreduce = False
        if options.zero_stage:
            self._make_slots()
            self._hand_over_scale()

    def forward(self, batch: Batch) -> ObjectiveOutput:  # noqa: D102
        if self._reduced_by_hooks:
            return self._engine(batch, reduces=self._engine.is_gradient_accumulation_boundary())
        return self._engine(batch)

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        # From ZeRO 1 on, DeepSpeed applies the loss scale (`_hand_over_scale`).
        self._engine.backward(loss if self.options.zero_stage else self.scale_loss(loss))
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def _update(self) -> StepResult:
        if self.options.zero_stage:
            self._engine.step()
            # DeepSpeed skips a step whose gradients are not finite, and reports an infinite norm.
            norm = torch.as_tensor(self._engine.get_global_grad_norm(), device=self.device)
            result = self.update_loss_scale(norm)
            self._hand_over_scale()
            return result
        # At ZeRO 0 the backward pass has reduced the gradients, and DeepSpeed computes no norm.
        result = self.unscale_and_clip()
        if result.skipped:
            # An optimizer ignores parameters without gradients, so the step updates nothing.
            self._optimizer.zero_grad(set_to_none=True)
        self._engine.step()
        return result

    def gather(self) -> TrainState:  # noqa: D102
        # At ZeRO 0 DeepSpeed's safe_get_* returns None, and safe_set_* does nothing.
        if not self.options.zero_stage:
            return super().gather()
        optimizer_states = {slot: self._whole_slot(slot) for slot in self.options.optimizer.optimizer_states}
        return self.make_state(self._whole_parameters(), optimizer_states)

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each parameter; it stays gathered until the next one is requested; collective."""
        for name, parameter in self.objective.named_parameters():
            with GatheredParameters([parameter], enabled=self._replica is not None):
                yield name, parameter

    def _whole_slot(self, slot: str) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trainable.items():
            yield name, safe_get_full_optimizer_state(parameter, slot)

    def restore(self, state: TrainState) -> None:  # noqa: D102
        if not self.options.zero_stage:
            super().restore(state)
            return
        self.restore_counters(state)
        self._hand_over_scale()
        if self.options.optimizer.counts_updates:
            for flat in self._flat_partitions():
                # None of DeepSpeed's safe_* calls reaches Adam's step counter.
                self._optimizer.state[flat]["step"].fill_(float(state.optimizer_step))
        for name, parameter in self.objective.named_parameters():
            value = state.parameters[name].to(self.device)
            with GatheredParameters([parameter], modifier_rank=0, enabled=self._replica is not None):
                parameter.data.copy_(value)
            if parameter.requires_grad:
                self._set_master(parameter, value, None)
                for slot, values in state.optimizer_states.items():
                    self._set_master(parameter, values[name].to(self.device), slot)

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """At ZeRO 3, gathers all parameters on each rank, in a second objective without DeepSpeed's hooks.

        The hooks are collective. Without them ranks may run the objective differently: different
        numbers of held-out batches, pictures on one rank.
        """
        if self._replica is None:
            with super().full_weights():
                yield
            return
        shell, sharded = self._replica, self.objective
        for parameter, target in zip(sharded.parameters(), shell.parameters(), strict=True):
            with GatheredParameters([parameter]):
                target.data = parameter.detach().clone()
        for buffer, copied in zip(sharded.buffers(), shell.buffers(), strict=True):
            copied.copy_(buffer)
        self.objective = shell
        try:
            yield
        finally:
            self.objective = sharded
            _free(shell)

    def close(self) -> None:
        """Leaves the process group, also within DeepSpeed, so that the next run in this process joins a new one."""
        deepspeed.comm.destroy_process_group()

    def _set_master(self, parameter: nn.Parameter, value: Tensor, slot: str | None) -> None:
        """Sets an optimizer slot of a parameter, or (slot None) ZeRO's float32 copy of the parameter."""
        if self.options.zero_stage < 3:
            if slot is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, slot)
            return
        # Each rank sets its own part: DeepSpeed 0.19's call for whole values fails if the parameter's
        # size is not a multiple of the number of ranks.
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = F.pad(value.flatten(), (0, size * self.ranks.world_size - value.numel()))
        part = padded.narrow(0, size * self.ranks.rank, size)
        if slot is None:
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, slot)

    def _flat_partitions(self) -> list[Tensor]:
        """Returns ZeRO's flat parameters: this rank's part of each optimizer group."""
        if self.options.zero_stage == 3:
            return list(self._wrapped.fp32_partitioned_groups_flat)
        return [group["params"][0] for group in self._optimizer.param_groups]

    def _make_slots(self) -> None:
        """Creates the optimizer's state before its first step, and links it to the parameters.

        DeepSpeed 0.19 links all groups once the first group has stepped, when the other groups have no
        state yet: safe_get_full_optimizer_state would fail for them.
        """
        for flat in self._flat_partitions():
            state = {slot: torch.zeros_like(flat) for slot in self.options.optimizer.optimizer_states}
            if self.options.optimizer.counts_updates:
                state["step"] = torch.zeros((), device=flat.device)
            self._optimizer.state[flat] = state
        if self.options.zero_stage < 3:
            self._wrapped._lazy_init_hp_params_optimizer_state()

    def _hand_over_scale(self) -> None:
        """Gives DeepSpeed our loss scale, which it applies to losses and removes from its shards of the gradients."""
        if self.loss_scale is not None:
            self._wrapped.override_loss_scale(self.loss_scale.scale)


def _free(shell: Task) -> None:
    for parameter in shell.parameters():
        parameter.data = torch.empty(0, device=parameter.device)


def deepspeed_config(options: StepOptions, *, trainable: int, device: torch.device) -> dict[str, Any]:
    """Generates DeepSpeed's config from our options; `trainable` is the number of trainable scalars.

    `DataParallel` has the bucket sizes of ZeRO 0.
    """
    if device.type == "cuda":
        # DeepSpeed sends a bucket while the backward pass fills the next one. A bucket must be large enough for
        # the interconnect's full rate, and small enough that the first is full early (ViT-B: 86 M parameters).
        bucket = max(1, min(ZERO_BUCKET, trainable))
        exchange = {"overlap_comm": True, "reduce_bucket_size": bucket, "allgather_bucket_size": ZERO_BUCKET}
    else:
        # One bucket: a CPU cannot overlap communication with computation. DeepSpeed allocates the
        # whole bucket (5e8 elements by default), so make it no larger than needed.
        exchange = {"reduce_bucket_size": max(1, min(500_000_000, trainable))}
    return {
        "train_micro_batch_size_per_gpu": options.batch_size_per_device,
        "gradient_accumulation_steps": options.accumulation,
        # At ZeRO 0 we clip gradients ourselves, because DeepSpeed would not return the norm.
        "gradient_clipping": (options.clip_grad or 0.0) if options.zero_stage else 0.0,
        "zero_optimization": {
            "stage": options.zero_stage,
            "stage3_param_persistence_threshold": options.zero_keeps_whole_below,
            **exchange,
        },
        # SGD and Adam work on flat shards. LARS does not; the config rejects it with ZeRO 1 to 3.
        "zero_allow_untested_optimizer": True,
        # Our own loop reports progress.
        "steps_per_print": None,
        # The timer would wait for the device twice in each micro-batch. The loop measures time itself.
        "timers": {"throughput": {"enabled": False}},
    }
