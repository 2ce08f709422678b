"""Batches on their way to a GPU, beside its work."""

from __future__ import annotations

import torch

from mae_vit.core.batch import Batch


class Copier:
    """Brings batches to the device; to a GPU on a stream of its own.

    The loop asks for a step's batch while the GPU still computes the step before (nothing waits for it but log
    steps): a copy among the kernels would come between the two, one beside them takes none of their time.
    """

    def __init__(self, device: torch.device) -> None:
        """Opens the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """Starts the copies, from pinned memory without waiting; what is launched next waits for them, on the GPU."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in (copied.images, copied.labels, copied.keys.index):
            # Else the next copy would get this memory as soon as the host lets go of it, a step before the GPU does.
            tensor.record_stream(computing)
        return copied
