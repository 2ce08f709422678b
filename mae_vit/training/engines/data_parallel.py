"""Gradients averaged over ranks beside the backward pass, by PyTorch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mae_vit.core.batch import Batch
from mae_vit.objectives.objective import ObjectiveOutput
from mae_vit.training.engines.state import persistent_buffers

Compression = Literal["none", "bf16"]
# Statistics of layers are averaged by the engine, after each step. torch 2.15 has renamed the option.
_NO_SYNC_OF_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DataParallel:
    """Runs a module whose parameters are equal on all ranks, and leaves them equal gradients."""

    def __init__(self, module: nn.Module, *, compression: Compression) -> None:
        """Wraps `module`; the ranks must have joined.

        Args:
            module: what computes the loss of a batch.
            compression: "bf16" sends gradients in half the bytes, rounded.
        """
        self._ddp = DistributedDataParallel(
            module,
            **{_NO_SYNC_OF_BUFFERS: False},  # type: ignore[arg-type]
            # No second copy of the gradients, but while micro-batches add up before the last one.
            gradient_as_bucket_view=True,
            # Every step computes the same: what is unused once is always so.
            static_graph=True,
        )
        if compression == "bf16":
            self._ddp.register_comm_hook(None, bf16_compress_hook)
        self._laid_out = False

    def forward(self, batch: Batch, *, reduces: bool) -> ObjectiveOutput:
        """Computes the loss of a micro-batch; its backward pass `reduces` gradients, or only adds to them."""
        if not self._laid_out:
            self._lay_out(batch)
        if reduces:
            return self._ddp(batch)
        with self._ddp.no_sync():
            return self._ddp(batch)

    def _lay_out(self, batch: Batch) -> None:
        """Takes a micro-batch for nothing, so that the first step reduces as all others do.

        DistributedDataParallel begins with one bucket, learns from the first two backward passes in
        which order gradients come, and then makes its buckets.
        Sums over ranks depend on the place in a bucket by a rounding: without this a resumed run
        would differ from one that went on. Nor may a static graph's first pass leave out the reduction.
        """
        self._laid_out = True
        buffers = persistent_buffers(self._ddp.module)
        kept = {name: buffer.clone() for name, buffer in buffers.items()}
        devices = [batch.images.device] if batch.images.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            for _ in range(2):
                self._ddp(batch).loss.backward()
                for parameter in self._ddp.module.parameters():
                    parameter.grad = None
        for name, buffer in buffers.items():
            buffer.copy_(kept[name])
