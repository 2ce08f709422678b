"""Pipelines that others use, each as fast as its users would make it on one core.

All draw a crop and a flip for each image. `official` is MAE's pipeline as published and ends in normalized float32;
the others end where ours does, in a uint8 batch (B, C, H, W) in the trainer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.loading.rows import BOX, PAD_PX, PHOTO_PX, Row
from mae_vit.data.index import open_index

# The normalization of the official MAE code.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PHOTO_BATCH, SMALL_BATCH = 64, 128
Batches = Iterable[Any]


def files_official(row: Row, folder: Path, workers: int) -> Batches:
    """The official MAE pipeline (its main_pretrain.py): ImageFolder, PIL, ToTensor, Normalize; a view of each image."""
    from torchvision import transforms

    views = [*pillow_views(row, size_of(row, folder)), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return from_files(row, folder, transforms.Compose(views), workers, views=1)


def files_pillow(row: Row, folder: Path, workers: int) -> Batches:
    """The same, but its batches are uint8, and each decoded image gives the row's number of views."""
    from torchvision import transforms

    views = [*pillow_views(row, size_of(row, folder)), transforms.PILToTensor()]
    return from_files(row, folder, transforms.Compose(views), workers, views=row.repeats)


def files_v2(row: Row, folder: Path, workers: int) -> Batches:
    """Torchvision's decoder and its v2 transforms on uint8 tensors."""
    from torchvision.io import ImageReadMode, decode_image, read_file

    def read(path: str) -> torch.Tensor:
        return decode_image(read_file(path), mode=ImageReadMode.RGB)

    return from_files(
        row, folder, tensor_views(row, size_of(row, folder)), workers, views=row.repeats, loader=read
    )


def memory_pillow(row: Row, folder: Path) -> Batches:
    """As torchvision's CIFAR10: an array in memory, a PIL image of each sample, transforms on it."""
    from PIL import Image
    from torchvision import transforms

    arrays = [pixels.permute(1, 2, 0).numpy() for pixels in decoded(folder / row.ours)]
    view = transforms.Compose([*pillow_views(row, size_of(row, folder)), transforms.PILToTensor()])
    return from_items(row, Views(arrays, lambda array: view(Image.fromarray(array)), 1))


def memory_v2(row: Row, folder: Path) -> Batches:
    """A tensor in memory, v2 transforms on each sample."""
    return from_items(row, Views(decoded(folder / row.ours), tensor_views(row, size_of(row, folder)), 1))


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
    import numpy as np
    from PIL import Image

    index = open_index(shards, "train")
    images = (Image.open(io.BytesIO(index.read(n))).convert("RGB") for n in range(len(index)))
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images]


class Views(Dataset[torch.Tensor]):
    """Views of items: one each, or (views, C, H, W)."""

    def __init__(self, items: Any, view: Callable[[Any], torch.Tensor], views: int) -> None:
        """Holds items and what makes a view of one."""
        self.items, self.view, self.views = items, view, views

    def __len__(self) -> int:
        """Items."""
        return len(self.items)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Makes an item's views."""
        item = self.items[number]
        if self.views == 1:
            return self.view(item)
        return torch.stack([self.view(item) for _ in range(self.views)])


class FirstOf:
    """The images of an ImageFolder, without their labels."""

    def __init__(self, pairs: Any) -> None:
        """Holds pairs of image and label."""
        self.pairs = pairs

    def __len__(self) -> int:
        """Images."""
        return len(self.pairs)

    def __getitem__(self, number: int) -> Any:
        """An image as its loader reads it."""
        return self.pairs[number][0]


def from_files(
    row: Row,
    folder: Path,
    view: Callable[[Any], torch.Tensor],
    workers: int,
    *,
    views: int,
    loader: Callable[[str], Any] | None = None,
) -> Batches:
    """Batches of the row's files, by as many workers."""
    from torchvision.datasets import ImageFolder

    files = ImageFolder(str(folder / row.peer), **({"loader": loader} if loader else {}))
    return from_items(row, Views(FirstOf(files), view, views), workers)


def from_items(row: Row, dataset: Views, workers: int = 0) -> Batches:
    """Batches of a dataset: as many images as ours has."""
    batch_size = (SMALL_BATCH if row.small else PHOTO_BATCH) // dataset.views
    sampler = RandomSampler(dataset, replacement=True, num_samples=(row.batches + 1) * batch_size)
    # A contender is spawned, and would spawn its workers too: users' workers fork.
    context = "fork" if workers else None
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, multiprocessing_context=context
    )
    return loader if dataset.views == 1 else Flat(loader)


class Flat:
    """Batches (B, views, C, H, W) as batches of all views."""

    def __init__(self, batches: Batches) -> None:
        """Holds batches."""
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Flattens each."""
        return (batch.flatten(0, 1) for batch in self.batches)


def by_batch(row: Row, images: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> Batches:
    """Batches that one call makes from the numbers of their images."""
    sampler = BatchSampler(
        RandomSampler(range(len(images)), replacement=True, num_samples=(row.batches + 1) * SMALL_BATCH),
        SMALL_BATCH,
        drop_last=True,
    )
    return _Calls(sampler, make)


class _Calls:
    def __init__(self, numbers: Iterable[list[int]], make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._numbers, self._make = numbers, make

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._make(torch.tensor(chosen)) for chosen in self._numbers)
