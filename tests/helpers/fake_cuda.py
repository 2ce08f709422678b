"""A GPU that computes nothing: tensors "on" it know shape, type and device, and mix with none of the CPU.

Real tensors of the CPU that get into an operation with those of the GPU raise, as on a GPU. What the
host reads back (`cpu()`, `item()`, ...) is ones; backward passes do nothing, for they ask a driver.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """While it is open, `.to("cuda")` makes fake tensors, autocast of "cuda" works, and reads give ones."""

    def read(tensor: Tensor) -> Tensor:
        with unset_fake_temporarily():
            return torch.ones(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, FakeTensor) else tensor

    def value_of(tensor: Tensor, how: Callable[[Tensor], object]) -> object:
        with unset_fake_temporarily():
            return how(read(tensor))

    def as_array(tensor: Tensor, how: Callable[[Tensor], object]) -> object:
        assert tensor.device.type == "cpu", "NumPy reads tensors of the CPU alone"
        return value_of(tensor, how)

    def backward(tensor: Tensor) -> None:
        assert tensor.device == CUDA
        assert tensor.requires_grad

    with pytest.MonkeyPatch.context() as patched, FakeTensorMode(allow_non_fake_inputs=True):
        for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
            patched.setattr(Tensor, name, partialmethod(value_of, how=getattr(Tensor, name)))
        for name in ("numpy", "bincount"):
            patched.setattr(Tensor, name, partialmethod(as_array, how=getattr(Tensor, name)))
        patched.setattr(Tensor, "cpu", read)
        patched.setattr(Tensor, "backward", backward)
        patched.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patched.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        yield


def on_cuda(module: nn.Module, *, but: str = "") -> nn.Module:
    """Moves parameters and buffers to the fake GPU, but for one that stays behind."""
    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    assert not but or but in names, f"{but} is none of {sorted(names)}"
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None or f"{prefix}.{name}".lstrip(".") == but:
                    continue
                moved = value.detach().to("cuda")
                is_weight = isinstance(value, nn.Parameter)
                table[name] = nn.Parameter(moved, value.requires_grad) if is_weight else moved
    return module
