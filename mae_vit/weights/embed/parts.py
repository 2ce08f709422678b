"""Features that are saved already: files beside the output, each of a range of images."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically, write_json
from mae_vit.runtime.locks import try_lock
from mae_vit.weights.embed.features import Features

FORMAT = 1
_NAME = re.compile(r"part-(\d{12})-(\d{12})\.npz")
_STATE = "state.json"
_LOCK = ".lock"


class Parts:
    """The folder of parts of one output, held by this process alone.

    A part is there whole or not at all. `state.json` says what they are features of.

    Attributes:
        folder: where they are.
    """

    def __init__(self, out: Path) -> None:
        """Takes the folder `OUT.parts`, which is made if need be.

        Raises:
            InputError: if another process has it.
        """
        self.folder, self._out = out.with_name(f"{out.name}.parts"), out
        self._lock = self._hold()

    def _hold(self) -> FileLock:
        path = self.folder / _LOCK
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = try_lock(path)
            if lock is None:
                with suppress(OSError):
                    who = path.read_text().strip()
                raise InputError(f"{self._out} is being written by {who or 'another process'}: let it end")
            # Whoever had it may have removed the folder meanwhile, and this file with it.
            if path.exists():
                path.write_text(
                    f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n"
                )
                return lock
            lock.release()

    def read_identity(self) -> dict[str, Any] | None:
        """What the parts are features of; None where there are none."""
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            return dict(state["identity"]) if state["format"] == FORMAT else {}
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return {}

    def begin(self, identity: dict[str, Any]) -> None:
        """Removes what there is, and begins with nothing."""
        (self.folder / _STATE).unlink(missing_ok=True)
        self._tidy()
        for path in self.folder.glob("part-*.npz"):
            path.unlink()
        write_json(self.folder / _STATE, {"format": FORMAT, "identity": identity})

    def done(self) -> int:
        """How many images, from the first on, are seen to; parts behind a gap are removed."""
        self._tidy()
        stop = 0
        for path in sorted(self.folder.glob("part-*.npz")):
            found = _NAME.fullmatch(path.name)
            if found is None or int(found[1]) != stop:
                path.unlink()
            else:
                stop = int(found[2])
        return stop

    def _tidy(self) -> None:
        """Removes what a kill has left half-written."""
        for path in [*self.folder.glob(".part-*.tmp"), *self.folder.glob("joined.*")]:
            path.unlink()

    def add(self, batches: list[Features]) -> None:
        """Saves batches that follow each other as one part."""
        broken = [line for batch in batches for line in batch.broken]
        stream = io.BytesIO()
        np.savez(
            stream,
            images=np.concatenate([batch.images for batch in batches]),
            features=np.concatenate([batch.features for batch in batches]),
            broken_images=np.array([image for image, _ in broken], np.int64),
            broken_reasons=np.array([reason for _, reason in broken], np.str_),
        )
        name = f"part-{batches[0].first:012d}-{batches[-1].stop:012d}.npz"
        write_atomically(self.folder / name, stream.getvalue())

    def read(self, *names: str) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields arrays of each part, in order: "images", "features", "broken_images", "broken_reasons".

        Raises:
            InputError: if a part is damaged.
        """
        for path in sorted(self.folder.glob("part-*.npz")):
            try:
                with np.load(path, allow_pickle=False) as part:
                    arrays = tuple(part[name] for name in names)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                raise InputError(
                    f"{path} is damaged ({error}): remove it, and the same command goes on from there"
                ) from None
            yield arrays

    def forget(self) -> None:
        """Gives the parts up, which are of no more use; `release` removes them."""
        (self.folder / _STATE).unlink(missing_ok=True)

    def release(self) -> None:
        """Lets other processes have the folder, which goes where nothing is to go on from."""
        if not (self.folder / _STATE).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()
