"""Loads the batches of one rank, from any step, with any number of workers."""

from __future__ import annotations

import atexit
import math
import multiprocessing
import multiprocessing.forkserver
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mae_vit.core.batch import Batch
from mae_vit.core.errors import Damage, DamagedSample, FetchUnavailable
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.data.batches.augmented import AugmentedSource, Views
from mae_vit.data.order.order import Order, RankSlice, Skipped, micro_batches, view_keys
from mae_vit.runtime.signals import STOP_SIGNALS, exit_with_parent, handling, without_main

_MAX_AUTO_WORKERS = 16
_MEMORY_WORKERS = 4
# Modules that workers need. The fork server imports them once, before it forks workers.
_PRELOAD = ["mae_vit.data.batches.loader"]
_PRELOAD_POLICIES = ["mae_vit.data.images.auto_augment"]


def start_worker_server(*, policies: bool = False) -> None:
    """Starts the fork server of the data workers. Call it before CUDA or NCCL start.

    The server and all workers ignore SIGTERM, SIGUSR1, SIGHUP and Ctrl-C. Schedulers, launchers
    and terminals send these to every process of a job, but the trainer still needs its workers
    to finish the step. Workers inherit the handlers, so they ignore signals from their start.
    """
    # Unregister first: a second call must not register a second handler.
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    multiprocessing.set_forkserver_preload([*_PRELOAD, *(_PRELOAD_POLICIES if policies else ())])
    with handling(STOP_SIGNALS, signal.SIG_IGN):
        multiprocessing.forkserver.ensure_running()


def _kill_workers() -> None:
    """Kills the remaining workers at exit, before multiprocessing's own exit handler runs.

    That handler sends SIGTERM and waits for ever, because workers ignore SIGTERM. A loader normally
    ends its workers itself; the traceback of a failed run keeps the loader alive until the exit.
    """
    for worker in multiprocessing.active_children():
        if worker.daemon:  # other processes belong to a program that calls this library
            worker.kill()


def _set_up_worker(worker: int) -> None:
    """Makes a worker ignore stop signals and exit when its parent dies."""
    # The fork server set this already, but torch's worker loop resets SIGTERM to its default.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # torch detects a dead trainer by the parent's process id. A worker's parent is the fork server, which lives on, so
    # workers would stay and keep their memory.
    exit_with_parent()


def replacement_candidates(place: int, samples: int) -> Iterator[int]:
    """Yields `place`, then the places that may replace it: place + 1, place + 3, place + 7, ... (modulo `samples`).

    The steps double, so 14 candidates suffice to leave a lost shard of 10,000 samples.
    """
    for power in range(samples.bit_length() + 1):
        yield (place + (1 << power) - 1) % samples


class _Batches(Dataset[Any]):
    """Computes whole micro-batches for (epoch, places); each place occurs `repeats` times in a row.

    With `replace`, the first intact candidate replaces a damaged sample. The choice depends only on which samples are
    damaged, not on rank, worker or epoch.
    """

    def __init__(self, source: AugmentedSource, seed: int, *, replace: bool, repeats: int = 1) -> None:
        self._source, self._seed, self._repeats, self._replace = source, seed, repeats, replace
        # Later epochs do not try to decode a damaged sample again.
        self._known: dict[int, Damage] = {}
        self._folder = Path()

    def __getitems__(self, position: tuple[int, np.ndarray]) -> Batch | DamagedSample | FetchUnavailable:
        (epoch, index), shape, source = position, self._source.shape, self._source.source
        images = _empty(source.dtype, len(index), *shape)
        labels = _empty(np.dtype(np.int64), len(index))
        masks = _empty(np.dtype(np.uint16), len(index), *shape[1:]) if source.has_masks else None
        out = Views(images.numpy(), labels.numpy(), None if masks is None else masks.numpy())
        try:
            damaged = self._render(epoch, index, out)
        except (DamagedSample, FetchUnavailable) as error:
            # Return the error: if a worker raises it, torch replaces the message by the worker's traceback.
            return error
        # Keys follow the order, not the sample read: a replacement gets the mask of the damaged sample. Keys are places
        # in the source; crops use numbers in the split. The two differ if the source is only a part of the split.
        keys = SampleKeys(self._seed, epoch, torch.from_numpy(view_keys(index, self._repeats)))
        return Batch(images, labels, keys, damaged, masks)

    def _render(self, epoch: int, index: np.ndarray, out: Views) -> tuple[Damage, ...]:
        """Renders the places `index` (B,) into `out`; returns the damaged samples that were replaced."""
        while True:
            places, passed, stuck = skip_damaged(index, self._known, len(self._source))
            if stuck:
                raise DamagedSample(stuck, self._folder)
            keys = view_keys(self._source.numbers(places), self._repeats)
            try:
                self._source.render(self._seed, epoch, places, keys, out)
                return tuple(passed.values())
            except DamagedSample as error:
                if not self._replace:
                    raise
                self._known |= {int(places[position]): damage for position, damage in error.damaged}
                self._folder = error.folder


def skip_damaged(
    index: np.ndarray, known: Mapping[int, Damage], samples: int
) -> tuple[np.ndarray, dict[int, Damage], list[tuple[int, Damage]]]:
    """Chooses what is read for the places `index` (B,) of all `samples`, of which `known` are damaged.

    Returns:
        The places to read, the damaged samples passed over, and the positions in `index` without an intact candidate.
    """
    places, passed, stuck = index.copy(), dict[int, Damage](), list[tuple[int, Damage]]()
    for position in np.flatnonzero(np.isin(index, list(known))).tolist() if known else ():
        place = int(index[position])
        for candidate in replacement_candidates(place, samples):
            if candidate not in known:
                places[position] = candidate
                break
            passed[candidate] = known[candidate]
        else:
            stuck.append((position, known[place]))
    return places, passed, stuck


def _empty(dtype: np.dtype, *shape: int) -> Tensor:
    """Allocates a tensor; workers use shared memory (as torch's `default_collate`), which saves torch a copy."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    if get_worker_info() is None:
        return torch.empty(shape, dtype=kind)
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=kind).set_(storage).view(shape)


def _unchanged(batch: Any) -> Any:
    return batch


def load_batches(
    source: AugmentedSource,
    order: Order,
    rank_slice: RankSlice,
    *,
    start_step: int,
    stop_step: int,
    skipped: Skipped = (),
    workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Yields a rank's micro-batches of steps start_step..stop_step-1, in order; data steps in `skipped` are passed.

    Intact samples replace damaged ones. Batches depend only on the arguments, and are the same for any number of
    `workers`, of which 0 decodes in this process. `pin_memory` puts them in page-locked memory, so that copies to a GPU
    do not block.
    """
    batches = _Batches(source, order.seed, replace=True, repeats=order.repeats)
    positions = micro_batches(order, rank_slice, start_step=start_step, stop_step=stop_step, skipped=skipped)
    return _load(batches, positions, workers=workers, pin_memory=pin_memory)


def _load(
    batches: _Batches, positions: Iterable[tuple[int, np.ndarray]], *, workers: int, pin_memory: bool
) -> Iterator[Batch]:
    """Yields the batch of each (epoch, places), in order; each worker loads two positions ahead."""
    loader = DataLoader(
        batches,
        batch_sampler=positions,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_set_up_worker,
        pin_memory=pin_memory,
        multiprocessing_context="forkserver" if workers else None,
        # DataLoader draws a seed for its workers; its own generator leaves torch's global one unchanged.
        generator=torch.Generator(),
    )
    with without_main():
        loading = iter(loader)
    for loaded in loading:
        if isinstance(loaded, (DamagedSample, FetchUnavailable)):
            raise loaded
        yield loaded


class FixedBatches:
    """Batches of given samples in order, for evaluation. Every pass is the same, with the keys of epoch 0.

    A damaged sample is an error unless `replace` is set, so that a score always refers to the same images.
    """

    def __init__(
        self,
        source: AugmentedSource,
        samples: np.ndarray,
        *,
        seed: int,
        batch_size: int,
        workers: int = 0,
        pin_memory: bool = False,
        replace: bool = False,
    ) -> None:
        """Splits the samples, places in `source` int64 (n,), into batches; reads no image yet.

        The last batch may be smaller. With `replace`, `Batch.damaged` names the damaged samples.
        """
        self._source, self._seed, self._replace = source, seed, replace
        self._chunks = [samples[at : at + batch_size] for at in range(0, len(samples), batch_size)]
        # More workers than batches would have nothing to do.
        self._workers, self._pin_memory = min(workers, len(self._chunks)), pin_memory

    def __iter__(self) -> Iterator[Batch]:
        """Yields all batches."""
        positions = [(0, chunk) for chunk in self._chunks]
        batches = _Batches(self._source, self._seed, replace=self._replace)
        return _load(batches, positions, workers=self._workers, pin_memory=self._pin_memory)


def choose_workers(
    asked: int | str, source: AugmentedSource, *, cores: int, on_gpu: bool, policies: bool
) -> int:
    """Returns the number of data processes per rank: `asked`, unless that is "auto".

    Images that are decoded on demand get `auto_workers`. Images in memory get none on a CPU: one core crops faster than
    the CPU trains. With a GPU they get up to four: one core makes some 20,000 random crops of 32 px per second, and the
    GPU would wait if the thread that launches its kernels made them. `policies` take 0.1 ms per 32 px image, so with
    policies and a GPU, images in memory get `auto_workers` too. `cores` are those of this rank.
    """
    if isinstance(asked, int):
        return asked
    workers = auto_workers(cores, on_gpu=on_gpu)
    if not source.in_memory or (policies and on_gpu):
        return workers
    return min(_MEMORY_WORKERS, workers) if on_gpu else 0


def auto_workers(cores: int, *, on_gpu: bool) -> int:
    """Returns the number of decoding processes: one per core, less those of the trainer, at most 16.

    The trainer gets one core, and with a GPU one more for every eight; with a GPU at least one process decodes. One
    thread of the trainer launches kernels without pause, another pins batches. With 15 workers on 16 cores an H200
    waited, with 8 much less (docs/performance.md). We think that a worker that shares its core with such a thread
    delays all, because batches are taken from the workers in turn.
    """
    if not on_gpu:
        return min(_MAX_AUTO_WORKERS, max(0, cores - 1))
    return min(_MAX_AUTO_WORKERS, max(1, cores - 1 - cores // 8))
