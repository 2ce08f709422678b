"""One process writes a run folder: a second one is refused, after a wait for one that is leaving."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.runtime.locks import try_lock

# Long enough for ranks whose launcher was killed: they finish a step, save and leave.
_WAIT_S = 20.0
# A network file system frees the locks of a machine that crashed after its lease (NFS: 90 s).
_WAIT_FOR_OTHERS_S = 120.0
_POLL_S = 0.2


def lock_run(folder: Path) -> FileLock:
    """Takes a run folder, which is made if need be, for this process.

    Raises:
        InputError: if another process keeps it, or if it cannot be written.
    """
    path, begun, said = folder / ".lock", time.monotonic(), False
    while True:
        lock = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = try_lock(path)
            if lock is not None:
                holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
                path.write_text(json.dumps(holder) + "\n")
                return lock
        except OSError as error:
            if lock is not None:
                with suppress(OSError):
                    lock.release()
            reason = error_reason(error)
            raise InputError(f"run folder {folder} cannot be written: {reason}") from None
        who, patience = _read_holder(path)
        if time.monotonic() - begun > patience:
            raise InputError(
                f"run folder {folder} is in use by {who}: let it end or stop it (SIGTERM saves), "
                "or give this run another run.name"
            )
        if not said:
            said = True
            print(f"{folder} is in use by {who}: waiting {patience:.0f} s for it to leave", file=sys.stderr)
        time.sleep(_POLL_S)


def _read_holder(path: Path) -> tuple[str, float]:
    """Who has the lock, for people, and how long to wait for it."""
    try:
        holder = json.loads(path.read_text())
        host, who = holder["host"], f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process", _WAIT_S
    return who, _WAIT_S if host == socket.gethostname() else _WAIT_FOR_OTHERS_S
