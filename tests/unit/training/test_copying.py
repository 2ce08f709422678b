"""Batches are copied to a GPU on a stream of their own; seen in the order of calls, as there is no GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.training.trainer import Copier

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class OnHost(SimpleNamespace):
    """A tensor of the host that notes on which stream it is copied, and what uses the copy."""

    def to(self, device, *, non_blocking):
        assert device == CUDA
        self.calls.append(("copy", self.name, self.current[-1], non_blocking))
        used = lambda stream: self.calls.append(("used by", self.name, stream.name))  # noqa: E731
        return SimpleNamespace(record_stream=used)


@pytest.fixture
def calls(monkeypatch):
    """Calls of `torch.cuda`'s streams, in order."""
    made, current = [], ["computing"]

    def stream_of(name: str) -> SimpleNamespace:
        waits = lambda other: made.append(("wait", name, other.name))  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=waits)

    @contextmanager
    def entered(stream):
        current.append(stream.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream_of("copying"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream_of(current[-1]))
    return SimpleNamespace(found=made, current=current)


def test_a_batch_is_copied_beside_the_gpus_work_which_waits_for_it_alone(calls):
    host = {name: OnHost(name=name, calls=calls.found, current=calls.current) for name in ("x", "y", "i")}
    copier = Copier(CUDA)
    copied = copier(Batch(host["x"], host["y"], SampleKeys(3, 2, host["i"]), damaged=("some",)))
    copies, wait, used = calls.found[:3], calls.found[3], calls.found[4:]
    # Queued on the other stream, without the host's waiting.
    assert sorted(copies) == [("copy", name, "copying", True) for name in ("i", "x", "y")]
    # What is launched from here on comes after them, and not the other way round: copies wait for no computing.
    assert wait == ("wait", "computing", "copying")
    # Their memory is not given away while the GPU still reads it.
    assert sorted(used) == [("used by", name, "computing") for name in ("i", "x", "y")]
    assert (copied.keys.seed, copied.keys.epoch, copied.damaged) == (3, 2, ("some",))


def test_on_a_cpu_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", None)
    batch = Batch(torch.zeros(1, 3, 2, 2), torch.zeros(1), SampleKeys(0, 0, torch.arange(1)))
    copied = Copier(CPU)(batch)
    assert copied.images is batch.images
    assert copied.keys.index is batch.keys.index


@pytest.mark.gpu
def test_copies_arrive_whole_while_the_gpu_is_busy():
    device = torch.device("cuda", torch.cuda.current_device())
    copier, busy, sums = Copier(device), torch.rand(4096, 4096, device=device), []
    for number in range(20):
        images = torch.full((64, 3, 64, 64), number, dtype=torch.uint8).pin_memory()
        copied = copier(Batch(images, torch.zeros(64), SampleKeys(0, 0, torch.arange(64))))
        busy = (busy @ busy).clamp(0, 1)
        sums.append((copied.images.float() + busy[0, 0] * 0).mean())
        del copied
    assert torch.stack(sums).tolist() == list(range(20))
