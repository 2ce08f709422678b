"""Opens and resumes a run of Weights & Biases. The only file that imports its package."""

from __future__ import annotations

import netrc
import os
import secrets
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers.base import Pictures, Scalars, TrackedRun, flatten

# Below the bounds of `background.py`, so that the package gives up first and cleanly.
_PATIENCE_S = 20.0
_EXIT_CODES: dict[Status, int] = {"done": 0, "interrupted": 75}
_LOGINS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
# The layout of .wandb files, which is LevelDB's log: a header, then blocks of records.
_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK, _RECORD_HEADER, _FULL, _LAST = 2**15, 7, 1, 4


class WandbRun:
    """A run of Weights & Biases: online with a key or a login, offline in the run folder without.

    Its own step is the training step. It drops steps that are not above its last one.
    """

    def __init__(self, run: TrackedRun, run_id: str | None) -> None:
        """Opens a run, or resumes the one of `run_id`."""
        # Else it prints, and reports its errors over the network.
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # The service of a parent process, such as a notebook, takes a killed process's run for one in use.
        os.environ.pop("WANDB_SERVICE", None)
        import wandb

        self._wandb = wandb
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_login() else "offline")
        local = run.folder / "wandb"
        self.run_id = run_id or _new_id()
        self.last_step = last_step_in(local, self.run_id) if run_id else 0
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mae-vit"),
            name=run.name,
            group=run.group,
            id=self.run_id,
            dir=str(run.folder),
            config=dict(run.config),
            mode=mode,  # type: ignore[arg-type]
            # Offline there is nothing to ask; the same id joins the parts when they are uploaded.
            resume="allow" if mode == "online" else None,
            # The command line and the git remote may hold tokens: they are not collected.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                init_timeout=_PATIENCE_S,
                finish_timeout=_PATIENCE_S,
            ),
        )
        self.where = f"wandb sync {local}/offline-run-*"
        if mode == "online":
            self.last_step = max(self._run.step - 1, 0) if self._run.resumed else 0
            self.where = self._run.url

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores a step as one row."""
        images = {name: self._wandb.Image(picture) for name, picture in pictures.items()}
        self._run.log({**scalars, **images}, step=step, commit=True)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the summary; an interrupted run is shown as preempted."""
        flat = flatten(summary, separator="/")
        self._run.summary.update({f"summary/{name}": value for name, value in flat.items()})
        self._run.summary.update({"summary/status": status})
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))


def last_step_in(folder: Path, run_id: str) -> int | None:
    """Returns the last step that a run's offline files hold; None without files.

    The package writes them from another process, seconds late: a kill loses the last rows.
    """
    paths = list(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    return max((step for path in paths for step in steps_in(path)), default=0) if paths else None


def steps_in(path: Path) -> list[int]:
    """Returns the step of each row of metrics in a .wandb file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for content in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    return steps


def _records(content: bytes) -> list[bytes]:
    """Splits a .wandb file; a torn end is left out.

    Raises:
        ValueError: if the file has another layout.
    """
    if not _HEADER.startswith(content[: len(_HEADER)]):
        raise ValueError("the .wandb files have an unknown layout")
    found, parts, place = [], b"", len(_HEADER)
    while place + _RECORD_HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD_HEADER:  # padding
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        begin, place = place + _RECORD_HEADER, place + _RECORD_HEADER + length
        if not _FULL <= kind <= _LAST or place > len(content):
            break
        parts += content[begin:place]
        if kind in (_FULL, _LAST):
            found.append(parts)
            parts = b""
    return found


def _has_login() -> bool:
    """Whether the package can log in without a prompt."""
    if any(os.environ.get(name) for name in _LOGINS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _new_id() -> str:
    """Draws an id from the system, which no seed reaches."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
