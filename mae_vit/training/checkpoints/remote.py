"""A run folder behind a URL: the run writes a local copy, and each save is copied to the URL.

What stands behind the URL counts. A run that starts takes over its files and its newest intact checkpoint, and drops
whatever else the local copy has. A checkpoint's `state.json` is uploaded last and removed first: without it a folder
is no checkpoint, so a kill never leaves a torn one. Its checksums reject files that a store cut short.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from filelock import FileLock

from mae_vit.core.errors import RemoteError, RemoteUnavailable
from mae_vit.core.files import user_cache
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import is_lasting, redact_url
from mae_vit.training.checkpoints.checkpoint import (
    STATE,
    BrokenCheckpoint,
    CheckpointInfo,
    as_broken,
    described_checkpoint,
    is_checkpoint_name,
    list_checkpoints,
    read_newest,
    step_of,
    verify_checkpoint,
)

_CHECKPOINTS = "checkpoints"
# They say what the run is.
_FACTS = ("config.yaml", "summary.json")
# These stores have folders, which must exist before their files, and write a file in place, not at once.
_WITH_FOLDERS = ("file", "sftp")


class RemoteRun:
    """A run folder behind a URL.

    Rank 0 calls it, with the lock of the local copy; but any rank may call `newest` and `bring`.

    Attributes:
        local: the local copy.
        shown: the URL without credentials.
    """

    def __init__(self, url: str) -> None:
        self.shown, self._url = redact_url(url).rstrip("/"), url.rstrip("/")
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.shown)[-60:].strip("-.")
        name = f"{words}-{hashlib.sha256(self._url.encode()).hexdigest()[:12]}"
        self.local = user_cache().resolve() / "runs" / name
        self._copied: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Makes the local copy equal to the run behind the URL, with its newest intact checkpoint.

        Raises:
            RemoteError: if it cannot be read.
        """
        with self._failing("read"):
            names = self._names()
            whole = self.checkpoints()
            for path in self.local.iterdir():
                if path.name not in (".lock", _CHECKPOINTS):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._copied = {}
            for name in names:
                if not name.startswith(f"{_CHECKPOINTS}/") and not _is_passing(name.rpartition("/")[2]):
                    self._get(name, self.local / name)
                    self._copied[name] = _stamp(self.local / name)
            for path in list_checkpoints(self.local / _CHECKPOINTS):
                if path not in whole:
                    shutil.rmtree(path)
            self._bring_newest(whole)

    def fetch_before(self, step: int) -> None:
        """Brings the newest intact checkpoint from before `step` into the local copy. Raises RemoteError."""
        with self._failing("read"):
            self._bring_newest([path for path in self.checkpoints() if step_of(path) < step])

    def read_facts(self) -> dict[str, bytes]:
        """Returns the content of `config.yaml` and `summary.json`, if they exist, for a plan. Raises RemoteError."""
        with self._failing("read"):
            return {name: self._fs.cat_file(self._path(name)) for name in self._names() if name in _FACTS}

    def newest(self) -> CheckpointInfo | None:
        """Describes the newest checkpoint by its `state.json` alone, for a plan.

        Raises:
            BrokenCheckpoint: if there are checkpoints, all with a broken `state.json`.
            RemoteError: if it cannot be read.
        """

        def describe(path: Path) -> CheckpointInfo:
            with as_broken(path):
                return described_checkpoint(path, json.loads(self._state(path.name)))

        with self._failing("read"):
            return read_newest(self.checkpoints(), describe)[0]

    def bring(self, path: Path) -> Path:
        """Returns the folder of a checkpoint of the local copy of rank 0, on another rank.

        Nodes that do not share rank 0's disk download it. Raises RemoteError.
        """
        # Rank 0's home folder may have another path. One that `--resume PATH` names is no copy.
        if path.parts[-3:-1] != (self.local.name, _CHECKPOINTS):
            return path
        with self._failing("read"):
            if self._is_same(path):
                return path
            # Not into the folder of rank 0, which another node may share while it trains.
            folder = self.local.with_name(f"{self.local.name}.{socket.gethostname()}")
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                for other in list_checkpoints(folder):
                    if other.name != path.name:
                        shutil.rmtree(other)
                if not self._is_same(folder / path.name):
                    self._download(path.name, folder)
            return folder / path.name

    def upload_files(self) -> None:
        """Uploads what has changed in the run folder, without checkpoints. Raises RemoteError."""
        with self._failing("written"):
            files = dict(_files(self.local))
            for name in self._copied.keys() - files.keys():
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))
                del self._copied[name]
            for name, path in files.items():
                try:
                    stamp = _stamp(path)
                    if self._copied.get(name) != stamp:
                        self._put(path, name)
                        self._copied[name] = stamp
                except FileNotFoundError:
                    if path.exists():
                        raise

    def upload_checkpoint(self, path: Path) -> None:
        """Uploads a checkpoint, which counts once its `state.json` is there. Raises RemoteError."""
        with self._failing("written"):
            # What interrupted uploads and removals have left.
            names = {name.split("/")[1] for name in self._names() if name.startswith(f"{_CHECKPOINTS}/")}
            for name in names - {whole.name for whole in self.checkpoints()}:
                # A folder that was a run's own before it got a URL has other names, too.
                if is_checkpoint_name(name) or (name.startswith(".step-") and _is_passing(name)):
                    self.remove(name)
            # The run may reach a step again after a restart.
            self.remove(path.name)
            *parts, state = sorted(path.iterdir(), key=lambda file: file.name == STATE)
            folder = f"{_CHECKPOINTS}/{path.name}"
            for part in parts:
                self._put(part, f"{folder}/{part.name}")
            there = self._names()
            if gone := [part.name for part in parts if f"{folder}/{part.name}" not in there]:
                raise RemoteError(
                    f"{self.shown}/{folder} has lost {', '.join(gone)}; does another run write there?"
                )
            self._put(state, f"{folder}/{STATE}")

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints whose upload is complete, as paths of the local copy, oldest first.

        Raises RemoteError.
        """
        with self._failing("read"):
            parts = (name.split("/") for name in self._names() if name.endswith(f"/{STATE}"))
            names = (part[1] for part in parts if len(part) == 3 and part[0] == _CHECKPOINTS)
            whole = (self.local / _CHECKPOINTS / name for name in names if is_checkpoint_name(name))
            return sorted(whole, key=step_of)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, by its name. Raises RemoteError."""
        with self._failing("written"):
            folder = self._path(f"{_CHECKPOINTS}/{name}")
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{folder}/{STATE}")
            with suppress(FileNotFoundError):
                self._fs.rm(folder, recursive=True)

    @property
    def _fs(self) -> Any:
        # fsspec keeps one for each kind and its options.
        return fsspec.core.url_to_fs(self._url)[0]

    def _path(self, name: str) -> str:
        return f"{fsspec.core.url_to_fs(self._url)[1].rstrip('/')}/{name}"

    def _names(self) -> list[str]:
        """Returns the names of all files, relative to the run folder; raises RemoteError if it is no run's."""
        root = self._path("")
        self._fs.invalidate_cache()
        try:
            # On S3 a folder may be an empty object.
            names = sorted(path[len(root) :] for path in self._fs.find(root) if not path.endswith("/"))
        except FileNotFoundError:
            return []
        if odd := [name for name in names if {"/", ".."} & {*PurePosixPath(name).parts}]:
            raise RemoteError(f"run.dir={self.shown} has a file named {odd[0]!r}, which no run writes")
        own = any(name in _FACTS or name.startswith(f"{_CHECKPOINTS}/") for name in names)
        if not own and not all(_is_passing(name.rpartition("/")[2]) for name in names):
            raise RemoteError(f"run.dir={self.shown} has other files; give a folder of its own")
        return names

    def _state(self, name: str) -> bytes:
        state: bytes = self._fs.cat_file(self._path(f"{_CHECKPOINTS}/{name}/{STATE}"))
        return state

    def _is_same(self, path: Path) -> bool:
        """Returns whether a local folder has the checkpoint of this name; `state.json` has the files' checksums."""
        return (path / STATE).exists() and (path / STATE).read_bytes() == self._state(path.name)

    def _bring_newest(self, paths: list[Path]) -> None:
        for path in reversed(paths):
            # A broken one stays for `newest_checkpoint`, which warns of it.
            with suppress(BrokenCheckpoint):
                if self._is_same(path):
                    with suppress(BrokenCheckpoint):
                        verify_checkpoint(path)
                        return
                self._download(path.name, path.parent)
                verify_checkpoint(path)
                return

    def _download(self, name: str, into: Path) -> None:
        partial = into / f".{name}.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(into / name, ignore_errors=True)
        root = f"{_CHECKPOINTS}/{name}/"
        for file in (file for file in self._names() if file.startswith(root)):
            self._get(file, partial / PurePosixPath(file).name)
        os.rename(partial, into / name)

    def _get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._path(name), str(path))

    def _put(self, path: Path, name: str) -> None:
        target = self._path(name)
        # Never on an object store: it would make a bucket of a misspelled name.
        if urlsplit(self._url).scheme not in _WITH_FOLDERS:
            self._fs.put_file(str(path), target)
            return
        folder, _, last = target.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.put_file(str(path), f"{folder}/.{last}.tmp")
        self._fs.mv(f"{folder}/.{last}.tmp", target)

    @contextmanager
    def _failing(self, how: str) -> Iterator[None]:
        """Turns errors of fsspec and the packages behind it into RemoteError."""
        try:
            yield
        except (RemoteError, BrokenCheckpoint):
            raise
        except ImportError as error:
            extra = ': pip install "mae-vit[remote]"' if self._url.startswith(("s3:", "gs:")) else ""
            raise RemoteError(f"{self.shown} cannot be {how}: {error}{extra}") from None
        except Exception as error:  # the packages behind fsspec raise errors of their own
            kind = RemoteError if is_lasting(error) else RemoteUnavailable
            raise kind(f"{self.shown} cannot be {how}: {error_reason(error)}") from None


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields name and path of each file to upload: no checkpoints, locks and files that are being written.

    The summary comes last, because it says that the run is done.
    """
    for path in sorted(folder.rglob("*"), key=lambda path: (path.name == "summary.json", path)):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _is_passing(path.name) and not name.startswith(f"{_CHECKPOINTS}/"):
            yield name, path


def _is_passing(name: str) -> bool:
    """Returns whether a file or folder of this name is a lock, or is being written."""
    return name == ".lock" or (name.startswith(".") and name.endswith(".tmp"))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
