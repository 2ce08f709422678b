"""Copies of a rank's tensors in host memory, made by rank 0 alone: it is the one that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# PyTorch rounds pinned allocations up to a power of two: one of a whole state could double it.
_CHUNK = 1 << 27
# Bytes at which every type is aligned.
_ALIGN = 64


def to_host(tensor: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
    """Copies a tensor to the CPU, contiguous, in `dtype`; None keeps its own."""
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def pinned(size: int) -> Tensor:
    """Allocates page-locked bytes, to which a GPU copies at full speed and without the host."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Staging:
    """Where rank 0 copies a state to, from which a thread writes it.

    On a GPU that is pinned memory, allocated by the first save and used again by each later one:
    the copies are queued, `wait` waits once for all of them. On a CPU each copy is new memory.
    """

    def __init__(
        self, device: torch.device, *, copies: bool, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        """Allocates nothing yet.

        Args:
            device: of what is copied.
            copies: whether this rank makes copies.
            allocate: makes a buffer of so many bytes to be used again; by default pinned memory for a GPU.
        """
        self._device, self._copies = device, copies
        self._allocate = allocate or (pinned if device.type == "cuda" else None)
        self._chunks: list[Tensor] = []
        self._used: list[int] = []

    def begin(self) -> None:
        """Writes over all earlier copies from now on; none of them may still be read."""
        self._used = [0] * len(self._chunks)

    def collect(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Copies named tensors, in `dtype` or their own; valid from `wait` to the next `begin`.

        Ranks that make no copies take the tensors one by one as well, and let go of them: to get one may be collective.
        """
        copied = {}
        for name, tensor in tensors:
            if self._copies:
                copied[name] = self._copy(tensor, dtype)
        return copied

    def wait(self) -> None:
        """Waits for the copies that are under way."""
        if self._copies and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self._allocate is None:
            return to_host(tensor, dtype)
        source = tensor.detach().to(dtype or tensor.dtype)
        target = self._room(source.nbytes, self._allocate).view(source.dtype).view(source.shape)
        # In the order of the stream that computes: whatever changes the tensor afterwards comes later.
        return target.copy_(source, non_blocking=True)

    def _room(self, size: int, allocate: Callable[[int], Tensor]) -> Tensor:
        """The first free bytes; in the same order of sizes the same ones at each save."""
        for number, chunk in enumerate(self._chunks):
            begin = self._used[number]
            if begin + size <= len(chunk):
                self._used[number] = -(-(begin + size) // _ALIGN) * _ALIGN
                return chunk[begin : begin + size]
        self._chunks.append(allocate(max(_CHUNK, 1 << (size - 1).bit_length())))
        self._used.append(0)
        return self._room(size, allocate)
