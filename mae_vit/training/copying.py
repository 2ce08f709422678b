"""Copies batches to a GPU while it computes."""

from __future__ import annotations

import torch

from mae_vit.core.batch import Batch


class Copier:
    """Copies batches to the device; to a GPU on a separate stream.

    The loop asks for a step's batch while the GPU still computes the step before (only log steps
    wait for it). A copy on the same stream would delay the next step; on a separate stream it overlaps.
    """

    def __init__(self, device: torch.device) -> None:
        """Opens the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """Starts the copies from pinned memory without blocking; later kernels wait for them on the GPU."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in (copied.images, copied.labels, copied.keys.index, copied.masks):
            # Without this the next copy could reuse the memory once the host frees it, while the GPU still reads it.
            if tensor is not None:
                tensor.record_stream(computing)
        return copied
