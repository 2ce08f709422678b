"""Converts images on several processes, in order and with bounded memory."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.convert import Conversion, Converted, convert_chunk
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.runtime.signals import blocked, exit_with_parent, without_main

Item = TypeVar("Item")
Pair = tuple[Item, bytes, str]

# Large enough that the round trip costs little, small enough to balance the processes.
_CHUNK_IMAGES = 256
_CHUNK_BYTES = 4 << 20
# Size of a chunk that this process converts: a step of the progress bar.
_FEW_IMAGES = 16
# Fewer images are converted faster than processes start.
_MIN_IMAGES = 512
_MAX_WORKERS = 16


def default_workers() -> int:
    """Returns the default number of processes: one for each core, up to a limit; 0 on a single core."""
    cores = cores_of_rank()
    return min(cores, _MAX_WORKERS) if cores > 1 else 0


class ConverterPool:
    """A pool of processes that decode and convert; with 0 workers, this process does."""

    def __init__(self, options: Conversion, workers: int = 0) -> None:
        """Starts no process yet."""
        self.options = options
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> ConverterPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self, images: Iterable[tuple[Item, bytes, str]], count: int
    ) -> Iterator[tuple[Item, bytes, Converted | str]]:
        """Yields (item, bytes, result) in order; the result is a reason if the image cannot be converted.

        Args:
            images: (item, bytes, extension); read ahead by a few chunks.
            count: approximate number of images.

        Raises:
            InputError: if a process died.
        """
        if not self._workers or count < _MIN_IMAGES:
            for chunk in _chunks(images, _FEW_IMAGES):
                results = convert_chunk([(data, extension) for _, data, extension in chunk], self.options)
                for (item, data, _), result in zip(chunk, results, strict=True):
                    yield item, data, result
            return
        pending: deque[tuple[list[Pair[Item]], Future[list[Converted | str]]]] = deque()
        try:
            for chunk in _chunks(images):
                task = [(data, extension) for _, data, extension in chunk]
                pending.append((chunk, self._submit(self._start(), task)))
                # Two chunks a worker: none waits while this process writes.
                if len(pending) > 2 * self._workers:
                    yield from _results(*pending.popleft())
            while pending:
                yield from _results(*pending.popleft())
        except BrokenProcessPool:
            raise InputError(
                "a process that decodes images died: too little memory (fewer --workers), or an image "
                "that crashes its decoder (--workers 0 --max-pixels N)"
            ) from None

    def _start(self) -> ProcessPoolExecutor:
        if self._executor is None:
            # Not forkserver: a process has one such server, with fixed imports, and training's server imports torch.
            # The imports of these workers take 0.2 s.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self._workers, context, initializer=exit_with_parent)
            # Workers inherit the blocked signal: Ctrl-C is for this process, which receives it afterwards.
            with blocked([signal.SIGINT]):
                for _ in range(self._workers):  # one task each starts all workers
                    self._submit(self._executor, [])
        return self._executor

    def _submit(
        self, executor: ProcessPoolExecutor, task: list[tuple[bytes, str]]
    ) -> Future[list[Converted | str]]:
        with without_main():  # submitting may start a process
            return executor.submit(convert_chunk, task, self.options)


def _chunks(images: Iterable[Pair[Item]], count: int = _CHUNK_IMAGES) -> Iterator[list[Pair[Item]]]:
    chunk: list[Pair[Item]] = []
    size = 0
    for image in images:
        chunk.append(image)
        size += len(image[1])
        if len(chunk) >= count or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _results(
    chunk: list[Pair[Item]], future: Future[list[Converted | str]]
) -> Iterator[tuple[Item, bytes, Converted | str]]:
    for (item, data, _), result in zip(chunk, future.result(), strict=True):
        yield item, data, result
