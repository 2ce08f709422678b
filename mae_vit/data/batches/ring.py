"""Batches in shared memory: data workers write slices of a batch in place, and the trainer takes it without a copy.

The memory is allocated once and, for a GPU, page-locked once: a batch costs no mapping, no page faults, no copy.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.heap import Arena
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.errors import Damage, InputError
from mae_vit.runtime.failures import TrainingFailed
from mae_vit.runtime.signals import exit_with_parent, without_main

if TYPE_CHECKING:
    from mae_vit.data.batches.loader import Renderer

# A message costs as much as some images: slices are no smaller.
_LEAST_SLICE = 16
_LEAST_SLOTS = 8


class _Failure(NamedTuple):
    error: Exception
    traceback: str


def ring_size(batch_size: int, workers: int, repeats: int = 1) -> tuple[int, int]:
    """Returns the samples of a slice and the slots of the ring, which hold two slices for each worker, or more."""
    per_slice = max(_LEAST_SLICE, -(-batch_size // workers))
    per_slice = -(-per_slice // repeats) * repeats
    slices = -(-batch_size // per_slice)
    return per_slice, max(_LEAST_SLOTS, 2 + -(-2 * workers // slices))


class _Ring:
    """Slots for records in shared memory. A slot is free again once nothing refers to the batch in it."""

    def __init__(self, kind: np.dtype, slots: int, *, pin_memory: bool) -> None:
        self.kind, self.slots, self.free = kind, slots, deque(range(slots))
        # Without a name, so a killed run leaves nothing. Python takes the temporary folder if /dev/shm is too small.
        self.memory = Arena(slots * kind.itemsize)
        try:
            # If it is full by then, writing to it kills the process (SIGBUS).
            if hasattr(os, "posix_fallocate"):  # not macOS
                os.posix_fallocate(self.memory.fd, 0, self.memory.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot reserve
                raise self._refused("reserve") from None
        self._bytes = np.frombuffer(self.memory.buffer, np.uint8)
        self.records = np.frombuffer(self.memory.buffer, kind)
        if pin_memory:
            address, cuda = self._bytes.ctypes.data, torch.cuda.cudart()
            if int(cuda.cudaHostRegister(address, self.memory.size, 0)):  # the code has no bool
                # Files on a disk, which stand in for /dev/shm, cannot be page-locked.
                raise self._refused("page-lock")
            weakref.finalize(self._bytes, cuda.cudaHostUnregister, address).atexit = False

    def _refused(self, what: str) -> InputError:
        return InputError(
            f"each rank needs {self.memory.size / 2**20:.0f} MiB of shared memory for batches, and cannot {what} it; "
            "enlarge /dev/shm (docker run --shm-size=8g), or use data.workers=0"
        )

    def lend(self, slot: int, *, ahead: int) -> np.ndarray:
        """Returns the record of a slot, or a copy if the caller keeps over half of them; `ahead` are not lent yet."""
        # Views of an array refer to the array that owns the memory: `data` makes it this one, not all of it.
        record = np.frombuffer(self._bytes.data, self.kind, 1, slot * self.kind.itemsize)
        weakref.finalize(record, self.free.append, slot).atexit = False
        kept = self.slots - len(self.free) - ahead
        return record.copy() if kept > (self.slots + 1) // 2 else record


def load_in_workers(
    renderer: Renderer, positions: Iterable[tuple[int, np.ndarray]], *, workers: int, pin_memory: bool
) -> Iterator[Batch]:
    """Yields the batch of each (epoch, places), in order; none is larger than the first.

    A batch is the caller's as long as it refers to it; with `pin_memory`, until copies to a GPU are done.

    Raises:
        RuntimeError: if a worker ended, as the kernel ends one when memory is short.
    """
    coming = iter(positions)
    if (first := next(coming, None)) is None:
        return
    per_slice, slots = ring_size(len(first[1]), workers, renderer.repeats)
    ahead = [first, *islice(coming, slots - 1)]
    coming = chain(ahead, coming)
    ring = _Ring(renderer.kind(len(first[1])), len(ahead), pin_memory=pin_memory)
    # Slot -> epoch, samples and what came of each slice; in the order of the batches.
    filling = dict[int, tuple[int, int, list[Any]]]()
    with _started(renderer, ring, workers) as (tasks, answers):
        while True:
            while ring.free and (position := next(coming, None)) is not None:
                (epoch, places), slot = position, ring.free.popleft()
                ring.records["places"][slot, : len(places)] = places
                begins = range(0, len(places), per_slice)
                filling[slot] = epoch, len(places), [None] * len(begins)
                for begin in begins:
                    tasks.send((slot, epoch, begin, min(begin + per_slice, len(places))))
            if not filling:
                return
            due, (epoch, count, results) = next(iter(filling.items()))
            while True:
                # At once: the batch's other slices may wait for the same shard, one after another.
                for result in results:
                    if isinstance(result, _Failure):
                        raise result.error from RuntimeError(f"in a data worker:\n{result.traceback}")
                if None not in results:
                    break
                for answer in wait(list(answers)):
                    slot, begin, result = _receive(answer, answers)
                    filling[slot][2][begin // per_slice] = result
            del filling[due]
            damaged = tuple(dict.fromkeys(chain.from_iterable(results)))
            # No variable may refer to the record, which would keep its slot.
            yield renderer.finish(ring.lend(due, ahead=len(filling)), epoch, count, damaged)


def _receive(answer: Any, workers: dict[Connection, Any]) -> tuple[int, int, tuple[Damage, ...] | _Failure]:
    try:
        return answer.recv()
    except EOFError:
        worker = workers[answer]
        worker.join()
        code = f"{worker.exitcode} (killed)" if worker.exitcode < 0 else worker.exitcode
        raise TrainingFailed(
            f"data worker {worker.pid} ended with code {code}: is the memory full? Resume with a smaller data.workers"
        ) from None


@contextmanager
def _started(
    renderer: Renderer, ring: _Ring, workers: int
) -> Iterator[tuple[Connection, dict[Connection, Any]]]:
    """Starts workers; yields the pipe of their tasks and, with each worker, the one of its answers."""
    context = multiprocessing.get_context("forkserver")
    # Any worker takes the next task: a slow one delays its slice alone.
    (waiting, tasks), turn = context.Pipe(duplex=False), context.Lock()
    answers = dict[Connection, Any]()
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (renderer, ring.memory, ring.kind, waiting, turn, theirs)
            answers[ours] = context.Process(target=_work, args=arguments, daemon=True)
            with without_main():
                answers[ours].start()
            theirs.close()
        yield tasks, answers
    finally:
        for worker in answers.values():  # deaf to SIGTERM; what they write to disk is complete at any moment
            if worker.pid is not None:
                worker.kill()
                worker.join()
        for connection in (waiting, tasks, *answers):
            connection.close()


def _work(
    renderer: Renderer, memory: Arena, kind: np.dtype, tasks: Connection, turn: Any, answers: Connection
) -> None:
    """Renders slices until the trainer ends this process."""
    exit_with_parent()
    torch.set_num_threads(1)
    records = np.frombuffer(memory.buffer, kind)
    with suppress(EOFError, BrokenPipeError):  # the trainer is gone
        while True:
            with turn:
                slot, epoch, begin, end = tasks.recv()
            result: tuple[Damage, ...] | _Failure
            try:
                result = renderer.render(records[slot : slot + 1], epoch, begin, end)
            except Exception as error:
                result = _Failure(_sendable(error), traceback.format_exc())
            answers.send((slot, begin, result))


def _sendable(error: Exception) -> Exception:
    """Returns an error that can be pickled: the same, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of users and packages may do anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
