"""Data sets by name: digits, which are included, and those that torchvision downloads."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.entries import Entry, ImageSource, SourceOptions
from mae_vit.data.prepare.selection import draw_holdout

_DIGITS_TEST_SHARE = Fraction(1, 6)


def digits(_: SourceOptions | None = None) -> ImageSource:
    """Returns 1,797 handwritten digits, 8x8 gray: real images without a network.

    `digits.npz` is a copy of scikit-learn's: Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998, UCI
    Machine Learning Repository, doi:10.24432/C50P49), licensed under CC BY 4.0.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    entries = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        # Values are 0..16; 255/16 scales them to a byte.
        pixels = np.rint(image * (255 / 16)).astype(np.uint8)
        entries.append(_entry("train", str(label), f"{number:04d}", pixels))
    train, test = draw_holdout(entries, _DIGITS_TEST_SHARE, "test")
    return ImageSource("digits (scikit-learn)", [*train, *test])


def _cifar(kind: str, options: SourceOptions) -> ImageSource:
    """Reads CIFAR (CIFAR-100: fine classes) with torchvision, which unpickles only files with published checksums.

    Downloads go to a hidden folder in the output, kept for the next call; a failure leaves nothing.

    Raises:
        InputError: if there is no local copy and the download fails.
    """
    # Slow to import, and only used here.
    from torchvision import datasets

    read, name = getattr(datasets, kind), kind.lower()
    root = options.root or options.out / ".download"
    entries = []
    for split, train in (("train", True), ("test", False)):
        try:
            data = read(str(root), train=train, download=True)
        except (OSError, RuntimeError) as error:
            if options.root is None:
                shutil.rmtree(root, ignore_errors=True)
            raise InputError(
                f"{name}: no copy in {root}, and the download failed ({str(error).splitlines()[0]}); give --root "
                f"DIR with torchvision's {read.base_folder}, or an archive of class folders"
            ) from None
        for number, (pixels, label) in enumerate(zip(data.data, data.targets, strict=True)):
            entries.append(_entry(split, data.classes[label], f"{number:05d}", pixels))
    return ImageSource(f"{name} (torchvision)", entries)


def _entry(split: str, class_name: str, stem: str, pixels: np.ndarray) -> Entry:
    key = f"{class_name}/{stem}"
    return Entry(split, class_name, key, f"{split}/{key}.png", "png", partial(_encode, pixels))


def _encode(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


# Sources by their names on the command line.
DATASETS: dict[str, Callable[[SourceOptions], ImageSource]] = {
    "digits": digits,
    "cifar10": partial(_cifar, "CIFAR10"),
    "cifar100": partial(_cifar, "CIFAR100"),
}
