"""Locks between processes, on files: the end of the process that holds one frees it, however it ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


class Lock:
    """A lock that this process holds."""

    def __init__(self, file: TextIO) -> None:
        """Takes over the locked file."""
        self._file = file

    def note(self, text: str) -> None:
        """Replaces what the file says of its holder."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()

    def release(self) -> None:
        """Frees it; once more does no harm."""
        self._file.close()


def try_lock(path: Path) -> Lock | None:
    """Locks a file, which is made if need be; None if another process holds it.

    Where the file system has no locks it is taken for free: then nothing keeps processes apart.

    Raises:
        OSError: if the file cannot be written.
    """
    file = path.open("a+")
    if take_lock(file.fileno()):
        return Lock(file)
    file.close()
    return None


def take_lock(descriptor: int) -> bool:
    """Locks an open file; False if another process holds it.

    Where the file system has no locks it is taken for free: then nothing keeps processes apart.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock, once whoever holds it is through.

    Raises:
        OSError: if the file cannot be written.
    """
    with path.open("a+") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
