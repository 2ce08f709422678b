"""Batches of workers lie in a ring of shared memory; what a caller holds is never written again."""

import ctypes
import errno
import gc
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.batch_digests import open_digits

from mae_vit.core.errors import InputError
from mae_vit.data.batches.loader import load_batches, start_worker_server
from mae_vit.data.batches.ring import ring_size
from mae_vit.data.batches.sources import Sample
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice
from mae_vit.runtime.failures import TrainingFailed
from mae_vit.training.trainer import Copier

SLOTS = 8


@pytest.fixture(scope="module")
def source(digits):
    start_worker_server()
    return open_digits(open_index(digits, "train"), "tar")


def load(source, steps, *, workers=2, batch=48, **options):
    order = GlobalOrder(len(source), batch, seed=0)
    return load_batches(source, order, RankSlice(), start_step=0, stop_step=steps, workers=workers, **options)


def test_slots_are_used_again_but_not_while_a_batch_is_held(source):
    assert ring_size(48, 2) == (24, SLOTS)
    expected, held, places = list(load(source, 30, workers=0)), [], set()
    for number, batch in enumerate(load(source, 30)):
        assert torch.equal(batch.images, expected[number].images)
        assert torch.equal(batch.labels, expected[number].labels)
        places.add(batch.images.data_ptr())
        if number < 3:
            held.append(batch.images[5:7])  # a view holds it too
    # Three or four held: of those that come, none is a copy.
    assert len(places) <= SLOTS
    for images, one in zip(held, expected, strict=False):
        assert torch.equal(images, one.images[5:7])


def test_one_who_keeps_all_batches_gets_copies(source):
    kept = [batch.images for batch in load(source, 30)]
    for images, expected in zip(kept, load(source, 30, workers=0), strict=True):
        assert torch.equal(images, expected.images)


@pytest.mark.parametrize(
    ("batch", "workers", "repeats", "expected"),
    [
        (256, 13, 1, (20, 8)),
        (256, 13, 8, (24, 8)),
        # Small batches: two slices for each worker are two batches or more.
        (16, 13, 1, (16, 28)),
        (4096, 4, 1, (1024, 8)),
    ],
)
def test_a_ring_holds_two_slices_for_each_worker(batch, workers, repeats, expected):
    assert ring_size(batch, workers, repeats) == expected


def test_a_killed_worker_is_an_error(source):
    batches = load(source, 500)
    next(batches)
    worker = multiprocessing.active_children()[-1]
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(TrainingFailed, match=f"data worker {worker.pid} ended with code -9"):
        list(batches)
    assert not multiprocessing.active_children()


@dataclass
class Own:
    """A source of the user's own that takes no time; with `pixels` of None, it has a mistake."""

    labels: np.ndarray
    pixels: np.ndarray | None
    channels = 3
    dtype = np.dtype(np.uint8)
    has_masks = False

    def read(self, sample: int) -> Sample:
        return Sample(self.pixels[:])


def test_an_error_of_a_worker_comes_with_its_traceback(source):
    batches = load(type(source)(Own(np.zeros(96, np.int64), None), source.augment), 2)
    with pytest.raises(TypeError, match="subscriptable") as raised:
        next(batches)
    assert "in read" in str(raised.value.__cause__)
    assert not multiprocessing.active_children()


class OneFails(Own):
    """One slice fails at once, the others take their time, as those that wait for the same shard."""

    def read(self, sample: int) -> Sample:
        if sample:
            time.sleep(60)
        raise ValueError("the first slice")


def test_an_error_does_not_wait_for_the_other_slices(source):
    batches = load(type(source)(OneFails(np.zeros(2, np.int64), None), source.augment), 2, batch=2)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="the first slice"):
        next(batches)
    assert time.monotonic() - begun < 50


class NeedsTwo(Exception):
    """Pickle makes it from its one argument, its text."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Failing(Own):
    def read(self, sample: int) -> Sample:
        raise NeedsTwo("a fault", "a driver")


def test_an_error_that_cannot_be_pickled_comes_as_its_text(source):
    batches = load(type(source)(Failing(np.zeros(96, np.int64), None), source.augment), 2)
    with pytest.raises(RuntimeError, match="NeedsTwo: a fault in a driver") as raised:
        next(batches)
    assert "in read" in str(raised.value.__cause__)


def test_an_image_costs_the_trainer_few_microseconds(source):
    """At most 20 us of its CPU time; 3 were measured, and 24 where each batch was mapped anew, 70 with a copy."""
    own = Own(np.zeros(2560, np.int64), np.ones((3, 224, 224), np.uint8))
    batches = load(type(source)(own, Augment((224, 224))), 40, workers=1, batch=64)
    for _ in range(10):
        next(batches)
    begun = time.process_time()
    images = sum(len(batch.images) for batch in batches)
    assert images == 30 * 64
    assert (time.process_time() - begun) / images < 20e-6


def test_memory_is_locked_once_and_until_nothing_refers_to_it(source, monkeypatch):
    calls, sizes = [], []

    def register(address, size, flags):
        calls.append(("lock", address))
        sizes.append(size)
        return torch._C._cudart.cudaError.success

    fake = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append(("free", address))
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    batches = load(source, 20, pin_memory=True)
    first = next(batches)
    ((_, address),) = calls
    inside = range(address, address + sizes[0])
    assert {first.images.data_ptr(), first.labels.data_ptr(), first.keys.index.data_ptr()} <= {*inside}
    for batch in batches:
        assert batch.images.data_ptr() in inside
    del batches
    gc.collect()
    assert len(calls) == 1
    assert ctypes.string_at(first.images.data_ptr(), 1) == first.images[0, 0, 0, :1].numpy().tobytes()
    del first, batch
    gc.collect()
    assert calls[1:] == [("free", address)]


def test_memory_that_cannot_be_page_locked_is_refused_in_one_line(source, monkeypatch):
    """As where a disk stands in for /dev/shm: the code of an error, like that of success, has no truth value."""
    code = torch._C._cudart.cudaError(1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: code))
    with pytest.raises(InputError, match=r" 0 MiB of .*/dev/shm"):
        next(load(source, 20, pin_memory=True))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="macOS cannot reserve memory")
def test_memory_that_another_rank_has_taken_is_missed_before_it_is_written(source, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"cannot reserve it; enlarge /dev/shm"):
        next(load(source, 20))


@pytest.mark.gpu
def test_a_gpu_gets_the_batches_of_the_host(source):
    copier, sums = Copier(torch.device("cuda", torch.cuda.current_device())), []
    busy = torch.rand(4096, 4096, device="cuda")
    for batch in load(source, 30, pin_memory=True):
        assert batch.images.is_pinned()
        moved = copier(batch)
        del batch
        busy = (busy @ busy).clamp(0, 1)
        sums.append(moved.images.sum() + moved.labels.sum() + moved.keys.index.sum())
    expected = [b.images.sum() + b.labels.sum() + b.keys.index.sum() for b in load(source, 30, workers=0)]
    assert torch.stack(sums).tolist() == torch.stack(expected).tolist()
