"""The device of a process: what it decides about the arithmetic there."""

import pytest
import torch
import torch.nn.functional as F

from mae_vit.runtime.device import choose_device, find_device
from mae_vit.runtime.ranks import Ranks, choose_threads


@pytest.fixture(autouse=True)
def as_torch_begins(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("take", [lambda: find_device(Ranks()), lambda: choose_device("auto")])
def test_float32_is_without_tf32_in_convolutions_too(take):
    take()
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_patch_projection_on_a_gpu_is_that_of_a_cpu(layout):
    device = find_device(Ranks())
    torch.manual_seed(0)
    images, weight = torch.randn(64, 3, 32, 32), torch.randn(128, 3, 4, 4)
    expected = F.conv2d(images.double(), weight.double(), stride=4)
    found = F.conv2d(
        images.to(device, memory_format=layout), weight.to(device, memory_format=layout), stride=4
    )
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("told", "torchs", "expected"),
    [
        (None, 8, (4, "one for each core of the rank")),
        ("1", 8, (1, "OMP_NUM_THREADS")),
        ("3,2", 8, (3, "OMP_NUM_THREADS")),
        # More than there are cores, too: it is what a person asks for.
        ("6", 8, (6, "OMP_NUM_THREADS")),
        ("auto", 8, (4, "one for each core of the rank")),
        (None, 2, (2, "as torch is set")),
    ],
)
def test_a_cpu_computes_with_the_threads_that_it_is_told(monkeypatch, told, torchs, expected):
    monkeypatch.setattr("mae_vit.runtime.ranks.cores_of_rank", lambda **ranks: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    torch.set_num_threads(torchs)
    assert choose_threads(Ranks()) == expected
    if not torch.cuda.is_available():
        find_device(Ranks())
        assert torch.get_num_threads() == expected[0]
    # Nobody told torchrun, which sets 1 itself for several ranks of a node.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    of_torchrun = (4, "one for each core of the rank") if told == "1" else expected
    assert choose_threads(Ranks(0, 2, 0, 2)) == of_torchrun
    assert choose_threads(Ranks()) == expected
