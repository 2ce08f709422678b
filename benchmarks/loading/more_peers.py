"""Peers that decode with packages of their own: simplejpeg, OpenCV, torchcodec, and SPDL's threads.

All but simplejpeg are optional; a peer whose packages are not installed takes no part. They read photographs alone,
because small images come from memory faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler

from benchmarks.loading.peers import BOX, PHOTO_BATCH, Batches, from_files, size_of, tensor_views
from benchmarks.loading.rows import Row

PACKAGES = ("cv2", "torchcodec", "spdl")


def is_there(*names: str) -> bool:
    """Whether packages are installed and can be imported: a decoder may miss its libraries."""
    try:
        for name in names:
            import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def version_of(name: str) -> str:
    """The version of a package, whichever distribution brought it: OpenCV has several."""
    distributions = metadata.packages_distributions()[name]
    return f"{distributions[0]} {metadata.version(distributions[0])}"


def files_simplejpeg(row: Row, folder: Path, workers: int) -> Batches:
    """The libraries of ours without our loader: simplejpeg, and torchvision's v2 transforms on uint8 tensors."""
    import simplejpeg

    def read(path: str) -> torch.Tensor:
        pixels = simplejpeg.decode_jpeg(Path(path).read_bytes())
        return torch.from_numpy(pixels).permute(2, 0, 1)

    view = tensor_views(row, size_of(row, folder))
    return from_files(row, folder, view, workers, views=row.repeats, loader=read)


def files_torchcodec(row: Row, folder: Path, workers: int) -> Batches:
    """Torchcodec's decoder, and torchvision's v2 transforms on uint8 tensors."""
    view = tensor_views(row, size_of(row, folder))
    return from_files(row, folder, view, workers, views=row.repeats, loader=_torchcodec())


def files_opencv(row: Row, folder: Path, workers: int) -> Batches:
    """OpenCV's decoder and its bilinear resize, as augmentation libraries on it do by default.

    It resizes without antialiasing, so its pixels are further from PIL's than those of the other peers.
    """
    import cv2
    import numpy as np
    from torchvision.transforms import v2

    size = size_of(row, folder)
    crop = v2.RandomResizedCrop(size, scale=BOX["scale"], antialias=True)

    def read(path: str) -> np.ndarray:
        # Here, because a worker has threads of its own.
        cv2.setNumThreads(0)
        return cv2.imread(path, cv2.IMREAD_COLOR_RGB)

    def view(pixels: np.ndarray) -> torch.Tensor:
        box = crop.make_params([torch.from_numpy(pixels).permute(2, 0, 1)])
        cut = pixels[box["top"] : box["top"] + box["height"], box["left"] : box["left"] + box["width"]]
        resized = cv2.resize(cut, (size, size), interpolation=cv2.INTER_LINEAR)
        if torch.rand(()) < 0.5:
            resized = cv2.flip(resized, 1)
        return torch.from_numpy(resized).permute(2, 0, 1)

    return from_files(row, folder, view, workers, views=row.repeats, loader=read)


def threads_spdl(row: Row, folder: Path) -> Batches:
    """SPDL's pipeline with a thread that decodes and resizes a whole batch by torchcodec and the v2 transforms."""
    from torchvision.datasets import ImageFolder

    files = [path for path, _ in ImageFolder(str(folder / row.peer)).samples]
    return _Threads(row, files, _torchcodec(), tensor_views(row, size_of(row, folder)))


def _torchcodec() -> Callable[[str], torch.Tensor]:
    from torchcodec.decoders import decode_jpeg

    def read(path: str) -> torch.Tensor:
        pixels: torch.Tensor = decode_jpeg(path, mode="RGB")
        return pixels

    return read


class _Threads:
    """A pipeline for each turn."""

    def __init__(
        self,
        row: Row,
        files: list[str],
        read: Callable[[str], torch.Tensor],
        view: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._row, self._files, self._read, self._view = row, files, read, view

    def _batch(self, numbers: list[int]) -> torch.Tensor:
        views = []
        for number in numbers:
            pixels = self._read(self._files[number])
            views += [self._view(pixels) for _ in range(self._row.repeats)]
        return torch.stack(views)

    def __iter__(self) -> Iterator[torch.Tensor]:
        from spdl.pipeline import PipelineBuilder

        images = PHOTO_BATCH // self._row.repeats
        sampler: Any = RandomSampler(
            self._files, replacement=True, num_samples=(self._row.batches + 1) * images
        )
        # A batch a task: a task for each image costs half as much again.
        pipeline = (
            PipelineBuilder()
            .add_source(sampler)
            .aggregate(images, drop_last=True)
            .pipe(self._batch)
            .add_sink()
            .build(num_threads=1)
        )
        with pipeline.auto_stop():
            yield from pipeline
