"""File locks between processes; a lock is released when its process ends, even by a kill."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import BinaryIO

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def try_lock(path: Path) -> BinaryIO | None:
    """Locks a file, creating it if needed, until it is closed; None if another process holds the lock. Raises OSError.

    filelock would do the same, but without the system's locks it leaves a mark that outlives a killed process.
    """
    file = path.open("ab")
    if try_lock_descriptor(file.fileno()):
        return file
    file.close()
    return None


def is_locked(path: Path) -> bool:
    """Returns whether a process holds a file's lock; False if there is no file or the file system has no locks."""
    try:
        with path.open("rb") as file:
            # Shared, so that processes which only ask do not meet each other.
            return not try_lock_descriptor(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def try_lock_descriptor(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file; returns False if another process holds the lock, True if the file system has no locks.

    On NFS a file must be open for writing, or for reading if `kind` is LOCK_SH. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
