"""Copies batches to the device while a GPU computes."""

from __future__ import annotations

import torch

from mae_vit.core.batch import Batch


class Copier:
    """Copies batches to the device; to a GPU on a separate stream.

    The loop requests the next batch while the GPU still computes. On a separate stream the copy
    overlaps with the computation instead of delaying the next step.
    """

    def __init__(self, device: torch.device) -> None:
        """Opens the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """Starts the copies without blocking; later kernels wait for them on the GPU."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in (copied.images, copied.labels, copied.keys.index, copied.masks):
            # Otherwise the next copy could reuse memory that the host has freed and the GPU still reads.
            if tensor is not None:
                tensor.record_stream(computing)
        return copied
