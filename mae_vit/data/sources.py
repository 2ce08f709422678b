"""Where `prepare` finds images: class folders, tar archives of them, digits, CIFAR-10."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
from PIL import Image

from mae_vit.data.index import IMAGE_EXTENSIONS
from mae_vit.data.tarwalk import DamagedTar, Member, walk_tar
from mae_vit.errors import InputError, nearest
from mae_vit.keyed import Stream, derive_key, words

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_DIGITS_TEST_SHARE = 1 / 6


@dataclass(frozen=True)
class Entry:
    """One image of a source.

    Attributes:
        split: "train", "val" or "test" (or the name given with --split).
        class_name: its label.
        stem: file name without extension; keys are made of it.
        extension: lower case, without the dot.
        read: returns the encoded bytes.
    """

    split: str
    class_name: str
    stem: str
    extension: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class ImageSource:
    """The images of one source, in a fixed order, read at random.

    Attributes:
        name: for people and for `dataset.json`; no machine's paths.
        entries: all images.
        ignored: files that are no images.
    """

    name: str
    entries: Sequence[Entry]
    ignored: int = 0


def open_source(spec: str, *, out: Path, split: str, root: Path | None) -> ImageSource:
    """Opens a source by what was typed.

    Args:
        spec: "digits", "cifar10", a folder, or a .tar, .tar.gz, .tgz archive.
        out: the output folder, where temporary files go.
        split: of images outside of split folders.
        root: where torchvision keeps, or puts, its download.

    Raises:
        InputError: if it is none of these, or holds no images.
    """
    path = Path(spec)
    if spec == "digits":
        source = _digits()
    elif spec == "cifar10":
        source = _cifar10(root or out / ".download")
    elif path.is_dir():
        source = _folder(path, split)
    elif path.is_file() and path.name.lower().endswith(_ARCHIVES):
        source = _archive(path, out, split)
    elif path.exists():
        raise InputError(f"source {spec}: neither a folder nor an archive ({', '.join(_ARCHIVES)})")
    else:
        raise InputError(f"source {spec} does not exist; {nearest(spec, ['digits', 'cifar10'])}")
    if not source.entries:
        raise InputError(f"source {spec} holds no images ({', '.join(IMAGE_EXTENSIONS)})")
    return source


def _digits() -> ImageSource:
    """scikit-learn's 1,797 handwritten digits, 8x8 grey: real images without a network."""
    # Slow to import, and only used here.
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = words(derive_key(0, Stream.PREPARE, 0), np.arange(len(digits.images)), 1)[0][:, 0]
    is_test = chosen < _DIGITS_TEST_SHARE * 2**32
    entries = []
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        # Ink is 0..16; 255/16 fills the byte.
        pixels = np.rint(image * (255 / 16)).astype(np.uint8)
        split = "test" if is_test[number] else "train"
        entries.append(Entry(split, str(label), f"{number:04d}", "png", _png_of(pixels)))
    return ImageSource("digits (scikit-learn)", entries)


def _cifar10(root: Path) -> ImageSource:
    """CIFAR-10 through torchvision, lossless."""
    # Slow to import, and only used here.
    from torchvision.datasets import CIFAR10

    entries = []
    for split, train in (("train", True), ("test", False)):
        try:
            data = CIFAR10(str(root), train=train, download=True)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"cifar10: no copy under {root} and no download ({str(error).splitlines()[0]}): "
                "give --root DIR with torchvision's cifar-10-batches-py, or an archive of class folders"
            ) from None
        for number, (pixels, label) in enumerate(zip(data.data, data.targets, strict=True)):
            entries.append(Entry(split, data.classes[label], f"{number:05d}", "png", _png_of(pixels)))
    return ImageSource("cifar10 (torchvision)", entries)


def _png_of(pixels: np.ndarray) -> Callable[[], bytes]:
    def read() -> bytes:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "png")
        return stream.getvalue()

    return read


def _folder(path: Path, split: str) -> ImageSource:
    found = []
    for folder, folders, files in os.walk(path):
        folders.sort()
        found += [Path(folder, name) for name in files]
    found.sort()
    names = [file.relative_to(path).as_posix() for file in found]
    entries = _entries(names, split, where=str(path), readers=[file.read_bytes for file in found])
    return ImageSource(path.name, entries, ignored=len(names) - len(entries))


def _archive(path: Path, out: Path, split: str) -> ImageSource:
    """Reads members in place; nothing is unpacked to a path that the archive chose."""
    # The readers below hold the file: it is closed, and a temporary one gone, with the last.
    file = path.open("rb") if path.name.lower().endswith(".tar") else _decompress(path, out)
    plain = Path(f"/dev/fd/{file.fileno()}")
    try:
        members = list(walk_tar(plain))
    except DamagedTar as error:
        raise InputError(f"archive {path} is damaged: {str(error).removeprefix(f'{plain}: ')}") from None
    for member in members:
        parts = PurePosixPath(member.name).parts
        if member.name.startswith("/") or ".." in parts:
            raise InputError(
                f'archive {path} holds the path "{member.name}", which leaves its folder: refused'
            )
    members.sort(key=lambda member: member.name)

    def reader(member: Member) -> Callable[[], bytes]:
        return lambda: os.pread(file.fileno(), member.size, member.offset)

    names = [str(PurePosixPath(member.name)) for member in members]
    entries = _entries(names, split, where=str(path), readers=[reader(member) for member in members])
    return ImageSource(path.name, entries, ignored=len(names) - len(entries))


def _decompress(path: Path, out: Path) -> BinaryIO:
    """Decompresses to a temporary file in OUT, since a compressed tar has no random access.

    The file has no name, so that not even a kill leaves it behind.
    """
    out.mkdir(parents=True, exist_ok=True)
    file: BinaryIO = tempfile.TemporaryFile(dir=out)  # noqa: SIM115 - the readers outlive this function
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
        file.flush()
    except (OSError, EOFError, zlib.error) as error:
        file.close()
        raise InputError(f"archive {path} cannot be decompressed: {error}") from None
    return file


def _entries(
    names: Sequence[str], split: str, *, where: str, readers: Iterable[Callable[[], bytes]]
) -> list[Entry]:
    """Reads split and class off paths: SPLIT/CLASS/.../file or CLASS/.../file, below one common top."""
    images = [
        (PurePosixPath(name).parts, read)
        for name, read in zip(names, readers, strict=True)
        if PurePosixPath(name).suffix.lower().lstrip(".") in IMAGE_EXTENSIONS
        and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    ]
    top = _common_top([parts for parts, _ in images])
    entries = []
    for full_parts, read in images:
        parts = full_parts[top:]
        own_split = SPLIT_NAMES.get(parts[0].lower()) if len(parts) > 1 else None
        if own_split is not None:
            parts = parts[1:]
        if len(parts) < 2:
            raise InputError(
                f'{where}: the image "{"/".join(full_parts)}" lies in no class folder: '
                "arrange them as CLASS/image or SPLIT/CLASS/image"
            )
        # Names that are no UTF-8 reach Python as surrogates, which JSON refuses.
        if _plain_text(parts[0]) != parts[0]:
            raise InputError(f"{where}: the class folder {_plain_text(parts[0])} is not named in UTF-8")
        stem, _, extension = parts[-1].rpartition(".")
        stem = _plain_text("_".join([*parts[1:-1], stem]))
        entries.append(Entry(own_split or split, parts[0], stem, extension.lower(), read))
    return entries


def _plain_text(name: str) -> str:
    """Writes bytes that are no UTF-8 as backslash escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _common_top(paths: Sequence[Sequence[str]]) -> int:
    """How many leading folders all paths share that are neither split nor class."""
    top = 0
    while (
        paths
        and all(len(parts) >= top + 3 and parts[top] == paths[0][top] for parts in paths)
        and paths[0][top].lower() not in SPLIT_NAMES
    ):
        top += 1
    return top
