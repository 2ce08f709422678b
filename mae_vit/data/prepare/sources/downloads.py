"""Data sets by name: digits, embedded, and those that torchvision downloads."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.entries import Entry, ImageSource, Reader
from mae_vit.data.prepare.selection import draw_holdout

_DIGITS_TEST_SHARE = Fraction(1, 6)


def digits() -> ImageSource:
    """Returns 1,797 handwritten digits, 8x8 gray: real images without a network.

    `digits.npz` holds them as scikit-learn has them: Optical Recognition of Handwritten Digits (Alpaydin and Kaynak
    1998, UCI Machine Learning Repository, doi:10.24432/C50P49), licensed under CC BY 4.0.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    entries = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        # Ink is 0..16; 255/16 fills the byte.
        pixels = np.rint(image * (255 / 16)).astype(np.uint8)
        entries.append(_entry("train", str(label), f"{number:04d}", pixels))
    train, test = draw_holdout(entries, _DIGITS_TEST_SHARE, "test")
    return ImageSource("digits (scikit-learn)", [*train, *test])


def cifar10(root: Path) -> ImageSource:
    """CIFAR-10, lossless."""
    return _cifar("CIFAR10", root)


def cifar100(root: Path) -> ImageSource:
    """CIFAR-100 with its 100 fine classes, lossless."""
    return _cifar("CIFAR100", root)


def _cifar(name: str, root: Path) -> ImageSource:
    """Reads CIFAR through torchvision, which unpickles only files of the published checksums."""
    # Slow to import, and only used here.
    from torchvision import datasets

    kind = getattr(datasets, name)
    entries = []
    for split, train in (("train", True), ("test", False)):
        try:
            data = kind(str(root), train=train, download=True)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"{name.lower()}: no copy under {root} and no download ({str(error).splitlines()[0]}): "
                f"give --root DIR with torchvision's {kind.base_folder}, or an archive of class folders"
            ) from None
        for number, (pixels, label) in enumerate(zip(data.data, data.targets, strict=True)):
            entries.append(_entry(split, data.classes[label], f"{number:05d}", pixels))
    return ImageSource(f"{name.lower()} (torchvision)", entries)


def _entry(split: str, class_name: str, stem: str, pixels: np.ndarray) -> Entry:
    key = f"{class_name}/{stem}"
    return Entry(split, class_name, key, f"{split}/{key}.png", "png", _png_of(pixels))


def _png_of(pixels: np.ndarray) -> Reader:
    def read() -> bytes:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "png")
        return stream.getvalue()

    return read
