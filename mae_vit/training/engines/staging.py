"""Copies tensors to host memory for a save. Only rank 0 makes copies, because it writes the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Bytes. PyTorch rounds a pinned allocation up to a power of two: a single one for a whole state could
# take twice its size.
_CHUNK = 1 << 27
# Bytes; a multiple of every dtype's size.
_ALIGN = 64


def to_host(tensor: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
    """Copies a tensor to the CPU, contiguous, in `dtype`; None keeps its dtype."""
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def pinned(size: int) -> Tensor:
    """Allocates `size` page-locked bytes, to which a GPU copies at full speed without the host."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Staging:
    """The memory to which rank 0 copies a state and from which a thread writes it.

    For a GPU it is pinned memory that the first save allocates and later saves reuse; copies are
    queued, and `wait` waits for all of them. On a CPU each copy is new memory.
    """

    def __init__(
        self, device: torch.device, *, copies: bool, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        """Allocates nothing yet.

        Args:
            device: device of the tensors to copy.
            copies: whether this rank makes copies.
            allocate: allocates a reusable buffer of so many bytes; by default pinned memory for a GPU.
        """
        self._device, self._copies = device, copies
        self._allocate = allocate or (pinned if device.type == "cuda" else None)
        self._chunks: list[Tensor] = []
        self._used: list[int] = []

    def begin(self) -> None:
        """Frees all earlier copies; nobody may read them any more."""
        self._used = [0] * len(self._chunks)

    def collect(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Copies named tensors in `dtype`, or in their own. The copies are valid from `wait` to the next `begin`.

        Ranks that make no copies iterate too, because producing a tensor may be collective.
        """
        copied = {}
        for name, tensor in tensors:
            if self._copies:
                copied[name] = self._copy(tensor, dtype)
        return copied

    def wait(self) -> None:
        """Waits for all queued copies."""
        if self._copies and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self._allocate is None:
            return to_host(tensor, dtype)
        source = tensor.detach().to(dtype or tensor.dtype)
        target = self._room(source.nbytes, self._allocate).view(source.dtype).view(source.shape)
        # Queued in the compute stream: the copy runs before any later change of the tensor.
        return target.copy_(source, non_blocking=True)

    def _room(self, size: int, allocate: Callable[[int], Tensor]) -> Tensor:
        """Returns the first free `size` bytes. Saves with the same sequence of sizes get the same bytes."""
        for number, chunk in enumerate(self._chunks):
            begin = self._used[number]
            if begin + size <= len(chunk):
                self._used[number] = -(-(begin + size) // _ALIGN) * _ALIGN
                return chunk[begin : begin + size]
        self._chunks.append(allocate(max(_CHUNK, 1 << (size - 1).bit_length())))
        self._used.append(0)
        return self._room(size, allocate)
