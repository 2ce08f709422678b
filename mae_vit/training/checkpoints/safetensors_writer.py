"""Safetensors files, written tensor by tensor while they are hashed.

The library's `save` copies all tensors into one piece and holds the interpreter's lock meanwhile: training beside it
stood still for a second per GB (benchmarks/scale.py). Its `save_file` does not, but tells of a full disk in words
alone, where a save goes by the error's number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mae_vit.core.files import write_parts_atomically

# The format's names, https://github.com/huggingface/safetensors#format.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes tensors atomically, on disk when it returns; other threads go on meanwhile.

    Args:
        path: of the file.
        tensors: on the CPU, by name.

    Returns:
        The SHA-256 of the file.

    Raises:
        OSError: if it cannot be written; nothing of it is left then.
    """
    digest = hashlib.sha256()

    def hashed() -> Iterator[memoryview]:
        for part in _parts(tensors):
            digest.update(part)
            yield part

    write_parts_atomically(path, hashed())
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The header, then the bytes of each tensor: wide types first, so that all lie aligned, as the library has it."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield tensors[name].detach().contiguous().flatten().view(torch.uint8).numpy().data
