"""Batches of one rank, from any step on, on any number of workers."""

from __future__ import annotations

import atexit
import math
import multiprocessing
import multiprocessing.forkserver
import signal
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mae_vit.core.batch import Batch
from mae_vit.core.errors import Damage, DamagedSample, FetchUnavailable
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.data.batches.damaged import WholeSamples
from mae_vit.data.batches.sources import Source
from mae_vit.data.order.order import Order, RankSlice, micro_batches, view_keys
from mae_vit.data.order.skipped_steps import Skipped
from mae_vit.runtime.signals import STOP_SIGNALS, exit_with_parent, handling

_MAX_AUTO_WORKERS = 16
_MEMORY_WORKERS = 4
# What workers need, imported once in the server they are forked from.
_PRELOAD = ["mae_vit.data.batches.loader"]
_PRELOAD_POLICIES = ["mae_vit.data.images.auto_augment"]


def start_worker_server(*, policies: bool = False) -> None:
    """Starts the process that data workers are forked from; call before CUDA or NCCL start.

    It and all workers ignore SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: schedulers, launchers and
    terminals send them to every process of a job, and the trainer still needs its
    workers to finish the step. The dispositions are inherited, so they hold from the
    first moment.

    Args:
        policies: workers change pixels by a policy, and share timm, which that takes.
    """
    # Once, however often this is called.
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    multiprocessing.set_forkserver_preload([*_PRELOAD, *(_PRELOAD_POLICIES if policies else ())])
    with handling(STOP_SIGNALS, signal.SIG_IGN):
        multiprocessing.forkserver.ensure_running()


def _kill_workers() -> None:
    """Before multiprocessing's own end, which terminates workers and waits: they are deaf to that.

    A failed run's traceback keeps its loader alive until then, else it ends them itself.
    """
    for worker in multiprocessing.active_children():
        worker.kill()


def _set_up_worker(worker: int) -> None:
    """Makes a worker deaf to stop signals, and mortal."""
    # Once more: torch's worker loop sets SIGTERM back to deadly.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # torch's own watch compares parent process ids; left over, workers would hold their memory for ever.
    exit_with_parent()


class _Batches(Dataset[Any]):
    """Computes whole micro-batches, keyed by (epoch, sample indices), each of these `repeats` times in a row."""

    def __init__(self, source: Source, seed: int, *, replace: bool, repeats: int = 1) -> None:
        self._source = source
        self._seed = seed
        self._repeats = repeats
        # Not a method: a cycle of references would keep shards open.
        self._views_of = partial(_views_of, source, repeats)
        self._whole = WholeSamples(source, self._views_of) if replace else None

    def __getitems__(
        self, position: tuple[int, np.ndarray]
    ) -> tuple[Tensor, Tensor, Tensor, int, tuple[Damage, ...]] | DamagedSample | FetchUnavailable:
        epoch, index = position
        damaged: tuple[Damage, ...] = ()
        pixels = _empty((len(index), *self._source.shape))
        out = None if pixels is None else pixels.numpy()
        try:
            if self._whole is not None:
                images, labels, damaged = self._whole.read(self._seed, epoch, index, out)
            else:
                images = self._source.images(self._seed, epoch, index, self._views_of(index), out)
                labels = self._source.labels_of(index)
        except (DamagedSample, FetchUnavailable) as error:
            # Raised, it would come out of a worker with the worker's traceback for a message.
            return error
        if pixels is None:
            pixels = torch.from_numpy(np.ascontiguousarray(images))
        # Masks and mixes are those of the order, whatever lies in its places.
        keys = torch.from_numpy(view_keys(index, self._repeats))
        return pixels, torch.from_numpy(labels.astype(np.int64)), keys, epoch, damaged

    def __getitem__(self, position: Any) -> Any:
        return self.__getitems__(position)


def _views_of(source: Source, repeats: int, places: np.ndarray) -> np.ndarray:
    """The numbers of the views of samples at `places`."""
    return view_keys(source.numbers(places), repeats)


def _empty(shape: tuple[int, ...]) -> Tensor | None:
    """In a worker, shared memory for a batch, as torch's own `default_collate` takes it.

    Pixels are put into it one by one; those of any other tensor are copied there when it is sent.
    """
    if get_worker_info() is None:
        return None
    storage = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class _Positions:
    """The batch sampler: positions rather than single samples, restartable."""

    def __init__(
        self, order: Order, share: RankSlice, start_step: int, stop_step: int, skipped: Skipped
    ) -> None:
        self._arguments = (order, share, start_step, stop_step, skipped)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        order, share, start_step, stop_step, skipped = self._arguments
        return micro_batches(order, share, start_step=start_step, stop_step=stop_step, skipped=skipped)

    def __len__(self) -> int:
        _, share, start_step, stop_step, _ = self._arguments
        return (stop_step - start_step) * share.accumulation


def _unchanged(batch: Any) -> Any:
    return batch


def load_batches(
    source: Source,
    order: Order,
    share: RankSlice,
    *,
    start_step: int,
    stop_step: int,
    skipped: Skipped = (),
    workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Yields a rank's micro-batches of steps start_step..stop_step-1, in order.

    Whole samples take the places of damaged ones (`mae_vit.data.batches.damaged`). There is no
    loader state: what comes is a function of the arguments alone, and the same for any
    `workers`.

    Args:
        source: where images come from.
        order: of the samples in each epoch.
        share: which slice of each step this rank takes.
        start_step: first optimizer step.
        stop_step: one past the last.
        skipped: steps of the order that are left out.
        workers: data processes; 0 decodes in this one.
        pin_memory: put batches in page-locked memory, for copies that do not block.
    """
    batches = _Batches(source, order.seed, replace=True, repeats=order.repeats)
    positions = _Positions(order, share, start_step, stop_step, skipped)
    yield from _load(batches, order.seed, positions, workers=workers, pin_memory=pin_memory)


def _load(batches: _Batches, seed: int, positions: Any, *, workers: int, pin_memory: bool) -> Iterator[Batch]:
    """Yields the batch of each (epoch, sample indices)."""
    for loaded in load_in_order(batches, positions, workers=workers, pin_memory=pin_memory):
        if isinstance(loaded, (DamagedSample, FetchUnavailable)):
            raise loaded
        images, labels, index, epoch, damaged = loaded
        yield Batch(images, labels, SampleKeys(seed, epoch, index), tuple(damaged))


def load_in_order(
    dataset: Dataset[Any], positions: Iterable[Any], *, workers: int, pin_memory: bool = False
) -> DataLoader[Any]:
    """Yields `dataset.__getitems__` of each position, in order, whatever the number of workers.

    Args:
        dataset: travels to the workers, pickled.
        positions: each is handed over as a whole; read ahead by two for each worker.
        workers: data processes, deaf to stop signals; 0 reads in this one.
        pin_memory: put tensors in page-locked memory, for copies that do not block.
    """
    return DataLoader(
        dataset,
        batch_sampler=positions,
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_set_up_worker,
        pin_memory=pin_memory,
        multiprocessing_context="forkserver" if workers else None,
        # Its own generator: DataLoader draws a seed for its workers, which must
        # not touch the framework's.
        generator=torch.Generator(),
    )


class FixedBatches:
    """Given samples in order, as often as one goes through them: keyed as of epoch 0.

    What is measured is measured on just these: a damaged one is an error, unless `replace` is asked for.
    """

    def __init__(
        self,
        source: Source,
        samples: np.ndarray,
        *,
        seed: int,
        batch_size: int,
        workers: int = 0,
        pin_memory: bool = False,
        replace: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            source: where images come from.
            samples: their numbers in it.
            seed: of their keys.
            batch_size: images of a batch; the last one may be smaller.
            workers: data processes; 0 reads in this one.
            pin_memory: put batches in page-locked memory.
            replace: take whole samples in the places of damaged ones, which `Batch.damaged` names.
        """
        self._source, self._seed, self._replace = source, seed, replace
        self._chunks = [samples[at : at + batch_size] for at in range(0, len(samples), batch_size)]
        # No more processes than there is work for.
        self._workers, self._pin_memory = min(workers, len(self._chunks)), pin_memory

    def __iter__(self) -> Iterator[Batch]:
        """Goes through all batches."""
        positions = [(0, chunk) for chunk in self._chunks]
        batches = _Batches(self._source, self._seed, replace=self._replace)
        return _load(batches, self._seed, positions, workers=self._workers, pin_memory=self._pin_memory)


def choose_workers(asked: int | str, source: Source, *, cores: int, on_gpu: bool, policies: bool) -> int:
    """Processes per rank, as asked; "auto": its cores but one, up to four for images in memory beside a GPU.

    Of images in memory one core crops more than a CPU trains on, which computes with all of its cores. A GPU
    would wait while the thread that launches its work makes batches, some 20,000 random crops of 32 px a second.

    Args:
        asked: `data.workers`.
        source: of the images.
        cores: of this rank.
        on_gpu: on a CPU the trainer keeps all cores busy itself.
        policies: images are changed by a policy: 0.1 ms for one of 32 px, too slow for one core beside a GPU.
    """
    if isinstance(asked, int):
        return asked
    workers = auto_workers(cores, on_gpu=on_gpu)
    if not source.in_memory or (policies and on_gpu):
        return workers
    return min(_MEMORY_WORKERS, workers) if on_gpu else 0


def auto_workers(cores: int, *, on_gpu: bool) -> int:
    """Processes that decode: all cores but one, at least one beside a GPU, at most 16."""
    return min(_MAX_AUTO_WORKERS, max(1 if on_gpu else 0, cores - 1))
