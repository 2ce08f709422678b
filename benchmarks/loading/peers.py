"""Pipelines that others use, each as fast as its users would make it on one core.

All draw a crop and a flip for each image. The official one is MAE's pipeline as published and ends in normalized
float32; the others end where ours does, in a uint8 batch (B, C, H, W) in the trainer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.loading.rows import BOX, PAD_PX, PHOTO_PX, Row
from mae_vit.data.index import open_index

# The normalization of the official MAE code.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PHOTO_BATCH, SMALL_BATCH = 64, 128
# Packages of peers that are not installed take no part.
PACKAGES = ("cv2", "torchcodec", "spdl")
# Pipelines of files: main_pretrain.py of the official code; the libraries of ours; others.
OFFICIAL, PLAIN = "files, official MAE, float32", "files, simplejpeg, uint8"
PILLOW, TORCHVISION = "files, PIL, uint8", "files, torchvision v2, uint8"
OPENCV, TORCHCODEC = "files, OpenCV, uint8", "files, torchcodec, uint8"
Batches = Iterable[Any]


def file_batches(name: str, row: Row, folder: Path, workers: int) -> Batches:
    """Batches of the row's files by a pipeline, by as many workers; the official one gives a view of each image."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    size, views, read = size_of(row, folder), row.repeats, READERS.get(name)
    if name == OFFICIAL:
        ends, views = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)], 1
        view = transforms.Compose([*pillow_views(row, size), *ends])
    elif name == PILLOW:
        view = transforms.Compose([*pillow_views(row, size), transforms.PILToTensor()])
    else:
        view = opencv_view(size) if name == OPENCV else tensor_views(row, size)
    files = ImageFolder(str(folder / row.peer), **({"loader": read} if read else {}))
    return from_items(row, Views(files, view, views, lambda number: files[number][0]), workers)


def read_torchvision(path: str) -> torch.Tensor:
    """By torchvision's decoder."""
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


def read_simplejpeg(path: str) -> torch.Tensor:
    """As ours does."""
    import simplejpeg

    return torch.from_numpy(simplejpeg.decode_jpeg(Path(path).read_bytes())).permute(2, 0, 1)


def read_torchcodec(path: str) -> torch.Tensor:
    """By torchcodec's decoder."""
    from torchcodec.decoders import decode_jpeg

    pixels: torch.Tensor = decode_jpeg(path, mode="RGB")
    return pixels


def read_opencv(path: str) -> np.ndarray:
    """By OpenCV's decoder."""
    import cv2

    # Here, because a worker has threads of its own.
    cv2.setNumThreads(0)
    return cv2.imread(path, cv2.IMREAD_COLOR_RGB)


READERS: dict[str, Callable[[str], Any]] = {
    TORCHVISION: read_torchvision,
    PLAIN: read_simplejpeg,
    TORCHCODEC: read_torchcodec,
    OPENCV: read_opencv,
}


def opencv_view(size: int) -> Callable[[np.ndarray], torch.Tensor]:
    """Crop by OpenCV's bilinear resize, as augmentation libraries on it do by default, and flip.

    It resizes without antialiasing, so its pixels are further from PIL's than those of the other peers.
    """
    import cv2
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(size, scale=BOX["scale"], antialias=True)

    def view(pixels: np.ndarray) -> torch.Tensor:
        box = crop.make_params([torch.from_numpy(pixels).permute(2, 0, 1)])
        cut = pixels[box["top"] : box["top"] + box["height"], box["left"] : box["left"] + box["width"]]
        resized = cv2.resize(cut, (size, size), interpolation=cv2.INTER_LINEAR)
        if torch.rand(()) < 0.5:
            resized = cv2.flip(resized, 1)
        return torch.from_numpy(resized).permute(2, 0, 1)

    return view


@dataclass(frozen=True)
class Threads:
    """SPDL's pipeline with a thread that decodes and resizes a whole batch by torchcodec and the v2 transforms."""

    row: Row
    folder: Path

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Builds a pipeline for a turn."""
        from spdl.pipeline import PipelineBuilder

        files = sorted(str(path) for path in (self.folder / self.row.peer).rglob("*.*"))
        view, repeats = tensor_views(self.row, size_of(self.row, self.folder)), range(self.row.repeats)

        def batch_of(numbers: list[int]) -> torch.Tensor:
            decoded = (read_torchcodec(files[number]) for number in numbers)
            return torch.stack([view(pixels) for pixels in decoded for _ in repeats])

        images = PHOTO_BATCH // self.row.repeats
        number = (self.row.batches + 1) * images
        sampler: Any = RandomSampler(files, replacement=True, num_samples=number)
        # A batch a task: a task for each image costs half as much again.
        batches = PipelineBuilder().add_source(sampler).aggregate(images, drop_last=True)
        pipeline = batches.pipe(batch_of).add_sink().build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline


def memory_pillow(row: Row, folder: Path) -> Batches:
    """As torchvision's CIFAR10: an array in memory, a PIL image of each sample, transforms on it."""
    from PIL import Image
    from torchvision import transforms

    arrays = [pixels.permute(1, 2, 0).numpy() for pixels in decoded(folder / row.ours)]
    view = transforms.Compose([*pillow_views(row, size_of(row, folder)), transforms.PILToTensor()])
    return from_items(row, Views(arrays, lambda array: view(Image.fromarray(array))))


def memory_v2(row: Row, folder: Path) -> Batches:
    """A tensor in memory, v2 transforms on each sample."""
    return from_items(row, Views(decoded(folder / row.ours), tensor_views(row, size_of(row, folder))))


def memory_one_box(row: Row, folder: Path) -> Batches:
    """A tensor in memory, v2 transforms on whole batches: one box and one flip for all images of a batch.

    That is less than the others do, so it stands beside them and is no peer.
    """
    images, view = torch.stack(decoded(folder / row.ours)), tensor_views(row, size_of(row, folder))
    return by_batch(row, images, lambda chosen: view(images[chosen]))


def memory_batch(row: Row, folder: Path) -> Batches:
    """A tensor in memory, crops and flips of a whole batch at once by plain torch, a box for each image.

    Shifts index windows of images that are padded once, as in fast CIFAR training code. Resized crops are drawn by
    torch operations on all boxes and sampled by `grid_sample` (bicubic): small images only grow, so that
    antialiasing has no part in it.
    """
    images = torch.stack(decoded(folder / row.ours))
    if row.crop == "pad":
        size = images.shape[-1]
        padded = torch.nn.functional.pad(images, [PAD_PX] * 4)
        # (n, C, top, left, size, size): a view, no copy.
        windows = padded.unfold(2, size, 1).unfold(3, size, 1)

        def shifted(chosen: torch.Tensor) -> torch.Tensor:
            top, left = torch.randint(2 * PAD_PX + 1, (2, len(chosen)))
            return flipped(windows[chosen, :, top, left])

        return by_batch(row, images, shifted)
    return by_batch(row, images, lambda chosen: flipped(resized_crops(images[chosen])))


def flipped(images: torch.Tensor) -> torch.Tensor:
    """Mirrors every second image (B, C, H, W) by chance."""
    mirrored = torch.rand(len(images)) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def resized_crops(images: torch.Tensor) -> torch.Tensor:
    """A random resized crop of each of some square uint8 images (B, C, H, W), to their size."""
    number = len(images)
    area = torch.empty(number).uniform_(*BOX["scale"])
    log_ratio = torch.empty(number).uniform_(*torch.tensor(BOX["ratio"]).log().tolist())
    # Shares of the side; torchvision draws anew where a side is too long, this cuts it.
    width = (area.sqrt() * (log_ratio / 2).exp()).clamp(max=1)
    height = (area.sqrt() * (-log_ratio / 2).exp()).clamp(max=1)
    theta = torch.zeros(number, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = width, height
    theta[:, 0, 2] = (1 - width) * torch.empty(number).uniform_(-1, 1)
    theta[:, 1, 2] = (1 - height) * torch.empty(number).uniform_(-1, 1)
    grid = torch.nn.functional.affine_grid(theta, list(images.shape), align_corners=False)
    pixels = torch.nn.functional.grid_sample(
        images.float(), grid, mode="bicubic", padding_mode="border", align_corners=False
    )
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def size_of(row: Row, folder: Path) -> int:
    """Side of the views, in pixels."""
    return open_index(folder / row.ours, "train").split_info.height[0] if row.small else PHOTO_PX


def pillow_views(row: Row, size: int) -> list[Callable[[Any], Any]]:
    """Crop and flip by torchvision's first transforms, a crop by its name there for each of ours."""
    from torchvision import transforms

    bicubic = transforms.InterpolationMode.BICUBIC
    crop = transforms.RandomResizedCrop(size, scale=BOX["scale"], interpolation=bicubic)
    if row.crop == "pad":
        crop = transforms.RandomCrop(size, padding=PAD_PX)
    return [crop, transforms.RandomHorizontalFlip()]


def tensor_views(row: Row, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Crop and flip by torchvision's v2 transforms, on uint8 tensors."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(
        size, scale=BOX["scale"], interpolation=v2.InterpolationMode.BICUBIC, antialias=True
    )
    if row.crop == "pad":
        crop = v2.RandomCrop(size, padding=PAD_PX)
    compose: Callable[[torch.Tensor], torch.Tensor] = v2.Compose([crop, v2.RandomHorizontalFlip()])
    return compose


def decoded(shards: Path) -> list[torch.Tensor]:
    """All images of shards as uint8 (C, H, W), decoded before any turn."""
    from PIL import Image

    index = open_index(shards, "train")
    images = (Image.open(io.BytesIO(index.read(n))).convert("RGB") for n in range(len(index)))
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images]


class Views(Dataset[torch.Tensor]):
    """Views of items, which `read` takes by number: one each, or (views, C, H, W)."""

    def __init__(
        self, items: Any, view: Callable[[Any], torch.Tensor], views: int = 1, read: Any = None
    ) -> None:
        self.items, self.view, self.views, self.read = items, view, views, read or items.__getitem__

    def __len__(self) -> int:
        """Items."""
        return len(self.items)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Makes an item's views."""
        item = self.read(number)
        if self.views == 1:
            return self.view(item)
        return torch.stack([self.view(item) for _ in range(self.views)])


@dataclass(frozen=True)
class Made:
    """Batches that a function makes of others, or of numbers; each turn begins them anew."""

    sources: Iterable[Any]
    make: Callable[[Any], torch.Tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Makes each."""
        return map(self.make, self.sources)


def from_items(row: Row, dataset: Views, workers: int = 0) -> Batches:
    """Batches of a dataset: as many images as ours has."""
    batch_size = (SMALL_BATCH if row.small else PHOTO_BATCH) // dataset.views
    sampler = RandomSampler(dataset, replacement=True, num_samples=(row.batches + 1) * batch_size)
    # A contender is spawned, and would spawn its workers too: users' workers fork.
    context = "fork" if workers else None
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, multiprocessing_context=context
    )
    return loader if dataset.views == 1 else Made(loader, lambda batch: batch.flatten(0, 1))


def by_batch(row: Row, images: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> Batches:
    """Batches that one call makes from the numbers of their images."""
    numbers = RandomSampler(range(len(images)), replacement=True, num_samples=(row.batches + 1) * SMALL_BATCH)
    batches = BatchSampler(numbers, SMALL_BATCH, drop_last=True)
    return Made(batches, lambda chosen: make(torch.tensor(chosen)))


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
