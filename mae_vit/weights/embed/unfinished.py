"""Features that are computed so far: an array on disk, and how many of its rows are done."""

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

    `features.npy` (N, D) has room for all images; rows of whole images follow each other in it. `state.json` says how
    many images are done, which of them are broken, and what identifies the features. It is written after the rows, so
    that rows that it does not count are computed again.

    Attributes:
        folder: `OUT.parts`.
        done: images that are done, from the first on, broken ones among them.
        broken: number and reason of each image without a row.
    """

    def __init__(self, out: Path) -> None:
        """Locks the folder, which is made if need be.

        Raises:
            InputError: if another process has it.
        """
        self.folder, self._out = out.with_name(f"{out.name}.parts"), out
        self.done, self.broken = 0, list[tuple[int, str]]()
        self._array: np.ndarray | None = None
        self._lock = self._take_lock()

    def _take_lock(self) -> FileLock:
        path = self.folder / _LOCK
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = try_lock(path)
            if lock is None:
                with suppress(OSError):
                    who = path.read_text().strip()
                raise InputError(f"{self._out} is being written by {who or 'another process'}: let it end")
            # Its last owner may have removed the folder meanwhile, and this file with it.
            if path.exists():
                since = time.strftime("%F %T")
                path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
                return lock
            lock.release()

    def read_identity(self) -> dict[str, Any] | None:
        """What identifies the features; None where there are none, empty where they are not understood."""
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                return {}
            self._identity, self.done = dict(state["identity"]), int(state["done"])
            self.broken = [(int(image), str(reason)) for image, reason in state["broken"]]
            return self._identity
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return {}

    def begin(self, identity: dict[str, Any]) -> None:
        """Starts over with no image done."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for path in self.folder.glob("*.np[yz]"):
            path.unlink()
        self._identity, self.done, self.broken = identity, 0, []

    def open(self, shape: tuple[int, int], dtype: str) -> None:
        """Opens the array, and makes it if there is none.

        Raises:
            InputError: if it is damaged.
        """
        path = self.folder / _FEATURES
        if not self.done:
            self._array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
            self._save()
            return
        try:
            # To read refuses a file that was cut short, which "r+" would fill with zeros.
            np.load(path, mmap_mode="r")
            self._array = np.lib.format.open_memmap(path, mode="r+")
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged ({error}): --restart begins again") from None
        if (self._array.shape, self._array.dtype) != (shape, np.dtype(dtype)):
            raise InputError(f"{path} is damaged (it has another size): --restart begins again")

    def add(self, batches: list[Features]) -> None:
        """Saves batches that follow what is done."""
        assert self._array is not None
        row = self.done - len(self.broken)
        for batch in batches:
            self._array[row : row + len(batch.features)] = batch.features
            row += len(batch.features)
            self.broken += batch.broken
        self._array.flush()  # type: ignore[attr-defined]
        self.done = batches[-1].stop
        self._save()

    def _save(self) -> None:
        write_json(
            self.folder / _STATE,
            {"format": FORMAT, "identity": self._identity, "done": self.done, "broken": self.broken},
        )

    def features(self) -> np.ndarray:
        """Features (rows, D) of the whole images, mapped from disk."""
        assert self._array is not None
        return self._array[: self.done - len(self.broken)]

    def forget(self) -> None:
        """Gives the features up; `release` removes them."""
        (self.folder / _STATE).unlink(missing_ok=True)

    def release(self) -> None:
        """Unlocks the folder, and removes it where nothing is left to resume."""
        self._array = None
        if not (self.folder / _STATE).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()
