"""Features that are computed so far: an array on disk, and how many images are done."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from mae_vit.core.errors import InputError
from mae_vit.core.files import write_json
from mae_vit.runtime.locks import try_lock
from mae_vit.weights.embed.features import Features

# 1 had a file for each part of the features.
FORMAT = 2
_STATE, _FEATURES, _LOCK = "state.json", "features.npy", ".lock"


class Unfinished:
    """The folder `OUT.parts` of one output, locked by this process.

    `features.npy` (N, D) has room for all images; its first rows are those of the whole images, in order.
    `state.json` is written after the rows. Rows that it does not count are computed again.

    Attributes:
        folder: `OUT.parts`.
        identity: what the features are of; None where there are none, empty where they are not understood.
        done: images that are done, from the first on, broken ones among them.
        broken: number and reason of each image without a row.
    """

    def __init__(self, out: Path) -> None:
        """Locks the folder, which is made if need be, and reads its state.

        Raises:
            InputError: if another process has it.
        """
        self.folder = out.with_name(f"{out.name}.parts")
        self._lock = _lock(self.folder / _LOCK, out)
        self.identity: dict[str, Any] | None = {}
        self.done, self.broken = 0, list[tuple[int, str]]()
        with suppress(ValueError, TypeError, KeyError):
            self._read_state()

    def _read_state(self) -> None:
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.identity = None
            return
        if state["format"] == FORMAT:
            broken = [(int(image), str(reason)) for image, reason in state["broken"]]
            self.identity, self.done, self.broken = dict(state["identity"]), int(state["done"]), broken

    def open(self, identity: dict[str, Any], shape: tuple[int, int], dtype: str, *, resume: bool) -> None:
        """Opens the array of what is done, or begins with an empty one.

        Raises:
            InputError: if the array is damaged.
        """
        path = self.folder / _FEATURES
        if not resume or not self.done:
            self.forget()
            self.identity, self.done, self.broken = identity, 0, []
            self._array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
            self.save()
            return
        try:
            # To read refuses a file that was cut short, which "r+" would fill with zeros.
            np.load(path, mmap_mode="r")
            self._array = np.lib.format.open_memmap(path, mode="r+")
            if (self._array.shape, self._array.dtype) != (shape, np.dtype(dtype)):
                raise ValueError("it has another size")
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged ({error}): --restart begins again") from None

    def add(self, batch: Features) -> None:
        """Writes the rows of a batch that follows what is done; `save` makes them count after a kill."""
        row = self.done - len(self.broken)
        self._array[row : row + len(batch.features)] = batch.features
        self.done = batch.stop
        self.broken += batch.broken

    def save(self) -> None:
        """Brings the rows to the disk, then their count."""
        self._array.flush()
        state = {"format": FORMAT, "identity": self.identity, "done": self.done, "broken": self.broken}
        write_json(self.folder / _STATE, state)

    def features(self) -> np.ndarray:
        """Returns the rows (K, D) of the whole images, mapped from disk."""
        return self._array[: self.done - len(self.broken)]

    def forget(self) -> None:
        """Gives the features up; `release` removes them."""
        (self.folder / _STATE).unlink(missing_ok=True)

    def release(self) -> None:
        """Unlocks the folder, and removes it where nothing is left to resume."""
        if not (self.folder / _STATE).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


def _lock(path: Path, out: Path) -> FileLock:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = try_lock(path)
        if lock is None:
            raise InputError(f"{out} is being written by {path.read_text() or 'another process'}: let it end")
        # Its last owner may have removed the folder meanwhile, and this file with it.
        if path.exists():
            since = time.strftime("%F %T")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}")
            return lock
        lock.release()
