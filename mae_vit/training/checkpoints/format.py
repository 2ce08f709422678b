"""The checkpoint format on disk: lists checkpoints, and writes, reads and verifies their parts.

`mae_vit.training.checkpoints.checkpoint` writes them and reads the whole state; `mae_vit.weights.read` reads
only the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from mae_vit.core.files import fsync_path, replacing

_NAME = re.compile(r"step-(\d{8,})")
FORMAT = 1
# Every checkpoint folder has this file.
STATE = "state.json"
# Identity key: the labels that the weights were trained on (`seen_labels.SeenLabels`), or None.
LABELS_SEEN = "labels_seen"
# Identity key: the training cost of the pretrained weights.
COST_BEFORE = "cost_before"
HISTORY = (LABELS_SEEN, COST_BEFORE)
Found = TypeVar("Found")


class BrokenCheckpoint(ValueError):
    """A checkpoint is incomplete or damaged."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the folders with a checkpoint's name, oldest first."""
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def step_of(path: Path) -> int:
    """Returns the step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def read_newest(folder: Path, read: Callable[[Path], Found]) -> tuple[Found | None, list[BrokenCheckpoint]]:
    """Reads the newest intact checkpoint.

    Returns:
        The result of `read` (None if there are no checkpoints), and the errors of newer, broken ones.

    Raises:
        BrokenCheckpoint: if there are checkpoints and all are broken.
    """
    paths, broken = list_checkpoints(folder), list[BrokenCheckpoint]()
    for path in reversed(paths):
        try:
            return read(path), broken
        except BrokenCheckpoint as error:
            broken.append(error)
    if paths:
        raise BrokenCheckpoint(f"all {len(paths)} checkpoints in {folder} are broken: {broken[0]}")
    return None, broken


def newest_before(folder: Path, step: int | None, read: Callable[[Path], Found]) -> Found | None:
    """Reads the newest intact checkpoint, before `step` if it is given; None if there is none."""
    for path in reversed(list_checkpoints(folder)):
        if step is None or step_of(path) < step:
            with suppress(BrokenCheckpoint):
                return read(path)
    return None


def read_description(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's `state.json`.

    Raises:
        BrokenCheckpoint: if it has another format.
        Exception: any other error; `as_broken` turns it into BrokenCheckpoint.
    """
    described: dict[str, Any] = json.loads((path / STATE).read_text())
    if described["format"] != FORMAT:
        raise BrokenCheckpoint(f"{path}: format {described['format']}, this version reads {FORMAT}")
    return described


def read_part(path: Path, part: str, described: dict[str, Any], *, load: bool = True) -> dict[str, Tensor]:
    """Verifies one part, such as "parameters", and reads its tensors; none if `load` is False.

    Raises:
        BrokenCheckpoint: if its checksum differs.
        Exception: any other error; `as_broken` turns it into BrokenCheckpoint.
    """
    file = path / f"{part}.safetensors"
    data = file.read_bytes() if load else b""
    digest = hashlib.sha256(data).hexdigest() if load else sha256_of_file(file)
    if digest != described["sha256"][part]:
        raise BrokenCheckpoint(f"{path}: {part}.safetensors is damaged (checksum differs)")
    return load_tensors(data) if load else {}


def sha256_of_file(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file, read a megabyte at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes CPU tensors atomically. They are on disk when it returns.

    safetensors' `save` would hold the GIL while it copies, which stops training for a second per GB.

    Returns:
        The SHA-256 of the file.

    Raises:
        OSError: if it cannot be written. Its partial file is removed.
    """
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        try:
            save_file(contiguous, partial)
        except SafetensorError as error:
            # The saver checks `errno` for a full disk; safetensors gives it only in its message.
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        digest = sha256_of_file(partial)
    fsync_path(path.parent)
    return digest


@contextmanager
def as_broken(path: Path) -> Iterator[None]:
    """Turns every error from an untrusted checkpoint into BrokenCheckpoint."""
    try:
        yield
    except BrokenCheckpoint:
        raise
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise BrokenCheckpoint(f"{path}: {name}: {(error.strerror or 'unreadable').lower()}") from None
    except Exception as error:  # any malformed content of an untrusted file
        raise BrokenCheckpoint(f"{path}: not a checkpoint: {type(error).__name__}: {error}") from None
