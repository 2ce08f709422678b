"""A bounded folder of fetched files, shared by all processes of a node.

Files are named by their SHA-256, so one that changes at its source is another file here,
and what two data folders share is fetched once. What was used longest ago makes room.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mae_vit.data.remote.streams import Refused, open_stream
from mae_vit.data.remote.urls import shown
from mae_vit.errors import Unreachable
from mae_vit.locks import locked

STALL_S = 30.0
# Below this a connection counts as silent.
_SLOWEST_BYTES_PER_S = 1024
# A server that restarts is back by then; a run that waits longer wastes its GPUs.
PATIENCE_S = 300.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0
_WARNED_AFTER_S = 10.0
_WRONG_BYTES_TRIES = 3
# Half-fetched files of processes that were killed: kept for the next try, which goes on there.
_PART = re.compile(r"\.([0-9a-f]{64})-(\d+)\.part")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """A file elsewhere.

    Attributes:
        url: where it is.
        bytes: its size.
        sha256: of its bytes.
    """

    url: str
    bytes: int
    sha256: str


class Cache:
    """Fetched files, at most `limit_bytes` of them together.

    Of one node a file is fetched by one process; the others wait for it.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, *, stall_s: float = STALL_S, patience_s: float = PATIENCE_S
    ) -> None:
        """Opens a folder, which must be there.

        Args:
            folder: of the files.
            limit_bytes: what they may take together, half-fetched ones included.
            stall_s: how long a source may be silent.
            patience_s: how long it is asked again and again while nothing comes.
        """
        self.folder, self.limit_bytes = folder, limit_bytes
        self._stall_s, self._patience_s = stall_s, patience_s

    def path(self, wanted: Wanted) -> Path:
        """Where a file lies once it is fetched."""
        return self.folder / wanted.sha256

    def fetch(self, wanted: Wanted, *, patience_s: float | None = None) -> Path:
        """Makes sure that a file is there: whole, checked.

        Args:
            wanted: the file.
            patience_s: for this one.

        Raises:
            Refused: if the source does not have it, or other bytes.
            Unreachable: if it cannot be had for `patience_s`, or written.
        """
        path = self.path(wanted)
        part = self.folder / f".{wanted.sha256}-{wanted.bytes}.part"
        while True:
            if path.exists():
                return path
            with part.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Meanwhile another may have fetched it, or thrown its part away.
                if not _is_at(file, part):
                    continue
                self._make_room(wanted, file)
                _fetch_into(file, wanted, self._stall_s, patience_s or self._patience_s)
                os.replace(part, path)
                return path

    def _make_room(self, wanted: Wanted, file: BinaryIO) -> None:
        """Removes what was used longest ago until `wanted`, whose part is `file`, fits."""
        until = time.monotonic() + self._patience_s
        while True:
            with locked(self.folder / ".room.lock"):
                if self._evict():
                    return
            # All of it is being fetched; what is through may go.
            if time.monotonic() > until:
                raise Unreachable(
                    f"the cache {self.folder} of {self.limit_bytes:,} bytes has no room for a file of "
                    f"{wanted.bytes:,}: raise data.cache_gib"
                )
            time.sleep(0.2)

    def _evict(self) -> bool:
        """Whether all fits into the limit, parts at their full sizes."""
        found = list[tuple[float, int, Path]]()
        for entry in os.scandir(self.folder):
            part = _PART.fullmatch(entry.name)
            if part or not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(
                        (status.st_mtime, int(part[2]) if part else status.st_size, Path(entry.path))
                    )
        taken = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if taken <= self.limit_bytes:
                break
            if _drop(path):
                taken -= size
        return taken <= self.limit_bytes


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _drop(path: Path) -> bool:
    """Removes a file, unless it is being fetched; readers that have it open keep it."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
    return True


def _fetch_into(file: BinaryIO, wanted: Wanted, stall_s: float, patience_s: float) -> None:
    """Fetches what a part lacks."""
    wrong = 0

    def fetch_rest() -> None:
        nonlocal wrong
        _receive(file, wanted, stall_s)
        if _digest(file) == wanted.sha256:
            return
        # Some of it is wrong, nobody knows which.
        file.truncate(0)
        wrong += 1
        if wrong >= _WRONG_BYTES_TRIES:
            raise Refused(f"{wrong} times other bytes than described")
        raise OSError("other bytes than described")

    keep_trying(fetch_rest, wanted.url, patience_s, progress=lambda: _size(file))
    os.fsync(file.fileno())


def keep_trying(
    act: Callable[[], None], url: str, patience_s: float, *, progress: Callable[[], int] = lambda: 0
) -> None:
    """Acts until it does not fail, or has failed for `patience_s` without progress.

    Raises:
        Refused: as `act`.
        Unreachable: naming the last failure.
    """
    since, best, wait, warned = time.monotonic(), progress(), _FIRST_WAIT_S, False
    while True:
        try:
            return act()
        except OSError as error:
            problem = (error.strerror or str(error) or type(error).__name__).lower()
        if progress() > best:
            since, best, wait = time.monotonic(), progress(), _FIRST_WAIT_S
        waited = time.monotonic() - since
        if waited >= patience_s:
            raise Unreachable(f"{shown(url)} cannot be fetched, for {patience_s:.0f} s: {problem}")
        if waited >= _WARNED_AFTER_S and not warned:
            warned = True
            left = patience_s - waited
            print(f"warning: {shown(url)}: {problem}; trying for {left:.0f} s more", file=sys.stderr)
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


def _receive(file: BinaryIO, wanted: Wanted, stall_s: float) -> None:
    """Appends the bytes that are lacking.

    Raises:
        OSError: if they do not come.
    """
    have = _size(file)
    if have >= wanted.bytes:
        return
    with open_stream(wanted.url, have, stall_s=stall_s) as stream:
        if stream.first != have:
            file.truncate(0)
            have = 0
        window_end, in_window = time.monotonic() + stall_s, 0
        while have < wanted.bytes:
            data = stream.read()[: wanted.bytes - have]
            if not data:
                raise OSError(f"it ends after {have:,} of {wanted.bytes:,} bytes")
            _append(file, data)
            have, in_window = have + len(data), in_window + len(data)
            if time.monotonic() > window_end:
                if in_window < _SLOWEST_BYTES_PER_S * stall_s:
                    raise TimeoutError(f"{in_window:,} bytes in {stall_s:g} s")
                window_end, in_window = time.monotonic() + stall_s, 0


def _append(file: BinaryIO, data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        # Asking the server again does not help.
        raise Unreachable(
            f"{file.name} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
