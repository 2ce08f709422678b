"""Loads the batches of one rank, from any step, with any number of workers."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import signal
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.errors import Damage, DamagedSample
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.data.batches.augmented import AugmentedSource, Views
from mae_vit.data.batches.ring import load_in_workers
from mae_vit.data.order.order import Order, RankSlice, Skipped, micro_batches, view_keys
from mae_vit.runtime.cores import without_cores
from mae_vit.runtime.signals import STOP_SIGNALS, handling

_MAX_AUTO_WORKERS = 16
_MEMORY_WORKERS = 4


def start_worker_server(*, policies: bool = False, gpu_cores: int | None = None) -> None:
    """Starts the fork server of the data workers. Call it before CUDA or NCCL start.

    With a GPU, workers stay off the trainer's share of the rank's `gpu_cores`.

    The server and all workers ignore SIGTERM, SIGUSR1, SIGHUP and Ctrl-C. Schedulers, launchers
    and terminals send these to every process of a job, but the trainer still needs its workers
    to finish the step. Workers inherit the handlers, so they ignore signals from their start.
    """
    # Unregister first: a second call must not register a second handler.
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    # Modules that workers need: the server imports them once, before it forks workers.
    of_policies = ["mae_vit.data.images.auto_augment"] if policies else []
    multiprocessing.set_forkserver_preload([__name__, *of_policies])
    # Of one core, or several ranks on the same few, workers need a part as well.
    reserved = min(0.5, _trainer_cores(gpu_cores) / gpu_cores) if gpu_cores else 0.0
    with handling(STOP_SIGNALS, signal.SIG_IGN), without_cores(reserved):
        multiprocessing.forkserver.ensure_running()


def _kill_workers() -> None:
    """Kills the remaining workers at exit, before multiprocessing's own exit handler runs.

    That handler sends SIGTERM and waits for ever, because workers ignore SIGTERM. A loader normally
    ends its workers itself; the traceback of a failed run keeps the loader alive until the exit.
    """
    for worker in multiprocessing.active_children():
        if worker.daemon:  # other processes belong to a program that calls this library
            worker.kill()


def replacement_candidates(place: int, samples: int) -> Iterator[int]:
    """Yields `place`, then the places that may replace it: place + 1, place + 3, place + 7, ... (modulo `samples`).

    The steps double, so 14 candidates suffice to leave a lost shard of 10,000 samples.
    """
    for power in range(samples.bit_length() + 1):
        yield (place + (1 << power) - 1) % samples


class Renderer:
    """Computes micro-batches for (epoch, places) in records; each place occurs `repeats` times in a row.

    With `replace`, the first intact candidate replaces a damaged sample. The choice depends only on which samples are
    damaged, not on rank, worker or epoch.
    """

    def __init__(self, source: AugmentedSource, seed: int, *, replace: bool, repeats: int = 1) -> None:
        self._source, self._seed, self.repeats, self._replace = source, seed, repeats, replace
        # Later epochs do not try to decode a damaged sample again.
        self._known: dict[int, Damage] = {}

    def kind(self, batch_size: int) -> np.dtype:
        """Returns the type of a record, with a field `places` int64 (B,)."""
        shape, source = self._source.shape, self._source.source
        masks = [("masks", np.uint16, (batch_size, *shape[1:]))] if source.has_masks else []
        fields = [("places", np.int64, (batch_size,)), ("labels", np.int64, (batch_size,)), *masks]
        return np.dtype([*fields, ("images", source.dtype, (batch_size, *shape))], align=True)

    def render(self, record: np.ndarray, epoch: int, begin: int, end: int) -> tuple[Damage, ...]:
        """Computes samples begin..end-1 of a record (1,); returns the damaged ones that it replaced."""
        source = self._source
        masks = record["masks"][0, begin:end] if source.source.has_masks else None
        views = Views(record["images"][0, begin:end], record["labels"][0, begin:end], masks)
        index = record["places"][0, begin:end]
        while True:
            places, passed, stuck = skip_damaged(index, self._known, len(self._source))
            if stuck:
                raise DamagedSample(stuck, source.source.index.folder)
            keys = view_keys(self._source.numbers(places), self.repeats)
            try:
                self._source.render(self._seed, epoch, places, keys, views)
                return tuple(passed.values())
            except DamagedSample as error:
                if not self._replace:
                    raise
                self._known |= {int(places[position]): damage for position, damage in error.damaged}

    def finish(self, record: np.ndarray, epoch: int, count: int, damaged: tuple[Damage, ...]) -> Batch:
        """Makes a batch that shares the record's memory."""
        tensors = {name: torch.from_numpy(record[name][0, :count]) for name in record.dtype.names or ()}
        # Keys follow the order, not the sample read: a replacement gets the mask of the damaged sample. Keys are places
        # in the source; crops use numbers in the split. The two differ if the source is only a part of the split.
        # In place, where the memory may be page-locked.
        tensors["places"].copy_(torch.from_numpy(view_keys(record["places"][0, :count], self.repeats)))
        keys = SampleKeys(self._seed, epoch, tensors["places"])
        return Batch(tensors["images"], tensors["labels"], keys, damaged, tensors.get("masks"))


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
    `workers`, of which 0 decodes in this process. `pin_memory`: those of workers lie in page-locked memory, so that
    copies to a GPU do not block; the caller keeps a batch until its copies are done (`training.trainer.Copier`).
    """
    batches = Renderer(source, order.seed, replace=True, repeats=order.repeats)
    positions = micro_batches(order, rank_slice, start_step=start_step, stop_step=stop_step, skipped=skipped)
    return _load(batches, positions, workers=workers, pin_memory=pin_memory)


def _load(
    batches: Renderer, positions: Iterable[tuple[int, np.ndarray]], *, workers: int, pin_memory: bool = False
) -> Iterator[Batch]:
    """Yields the batch of each (epoch, places), in order."""
    if workers:
        yield from load_in_workers(batches, positions, workers=workers, pin_memory=pin_memory)
        return
    for epoch, places in positions:
        record = np.empty(1, batches.kind(len(places)))
        record["places"][0] = places
        damaged = batches.render(record, epoch, 0, len(places))
        yield batches.finish(record, epoch, len(places), damaged)


class FixedBatches:
    """Batches of given samples in order, for evaluation. Every pass is the same, with the keys of epoch 0.

    The seed is not the run's: runs of all seeds are measured on the same images and masks. A damaged sample is an error
    unless `replace` is set, so that a score always refers to the same images.
    """

    def __init__(
        self,
        source: AugmentedSource,
        samples: np.ndarray,
        *,
        seed: int = 0,
        batch_size: int,
        workers: int = 0,
        replace: bool = False,
    ) -> None:
        """Splits the samples, places in `source` int64 (n,), into batches; reads no image yet.

        The last batch may be smaller. With `replace`, `Batch.damaged` names the damaged samples.
        """
        self._source, self._seed, self._replace = source, seed, replace
        self._chunks = [samples[at : at + batch_size] for at in range(0, len(samples), batch_size)]
        # More workers than batches would have nothing to do.
        self._workers = min(workers, len(self._chunks))

    def __iter__(self) -> Iterator[Batch]:
        """Yields all batches."""
        positions = [(0, chunk) for chunk in self._chunks]
        batches = Renderer(self._source, self._seed, replace=self._replace)
        return _load(batches, positions, workers=self._workers)


def choose_workers(asked: int | str, source: AugmentedSource, *, cores: int, on_gpu: bool) -> int:
    """Returns the number of data processes per rank: `asked`, unless that is "auto".

    Images that are decoded on demand get `auto_workers`. Images in memory get none on a CPU: one core crops faster than
    the CPU trains. With a GPU they get up to four: one core makes some 20,000 random crops of 32 px per second, and the
    GPU would wait if the thread that launches its kernels made them. Policies take 0.1 ms per 32 px image, so with
    policies and a GPU, images in memory get `auto_workers` too. `cores` are those of this rank.
    """
    if isinstance(asked, int):
        return asked
    workers = auto_workers(cores, on_gpu=on_gpu)
    if not source.in_memory or (source.augment.policy is not None and on_gpu):
        return workers
    return min(_MEMORY_WORKERS, workers) if on_gpu else 0


def auto_workers(cores: int, *, on_gpu: bool) -> int:
    """Returns the number of decoding processes: one per core, less those of the trainer, at most 16.

    With a GPU at least one process decodes. With 15 workers on 16 cores an H200 waited, with 8 much less
    (docs/performance.md).
    """
    if not on_gpu:
        return min(_MAX_AUTO_WORKERS, max(0, cores - 1))
    return min(_MAX_AUTO_WORKERS, max(1, cores - _trainer_cores(cores)))


def _trainer_cores(cores: int) -> int:
    """Returns how many of a rank's cores stay free beside a GPU: two threads launch kernels (forward, backward)."""
    return 1 + cores // 8
