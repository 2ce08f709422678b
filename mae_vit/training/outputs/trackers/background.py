"""Keeps experiment trackers away from training: a thread of its own for each, and one warning when it fails."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from mae_vit.core.messages import error_reason
from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers.base import Pictures, RemoteRun, Scalars
from mae_vit.training.outputs.trackers.names import ROLLED_BACK

# Training waits as long for a tracker at its start, and again at its end; never in between.
PATIENCE_S = 30.0
# Log steps that may wait for a slow tracker.
_MOST_WAITING = 10_000
# Their values never appear in a message.
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_URLS = ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI")


class BackgroundTracker:
    """Sends a run to an experiment tracker from a thread. No failure and no delay reaches training.

    A tracker cannot replace what it holds: Weights & Biases drops a step lower than its last, MLflow stores a
    second value beside the first. So each step is sent once: steps that the tracker holds already are not sent
    again when the run repeats them after a resume or a rollback.

    Attributes:
        title: names it in messages.
        run_id: by which the tracker resumes the run; None if it did not open.
    """

    def __init__(
        self,
        title: str,
        open_run: Callable[[], RemoteRun],
        *,
        logged_step: int,
        say: Callable[[str], None],
        patience_s: float | None = None,
    ) -> None:
        """Opens the tracker's run and waits for that, for a bounded time.

        Args:
            title: names it in messages.
            open_run: opens or resumes the run; called in the thread.
            logged_step: the last step in `metrics.jsonl` before this start: what a tracker that cannot say is
                taken to hold.
            say: prints a line.
            patience_s: the bound; `PATIENCE_S` by default.
        """
        self.title = title
        self.run_id: str | None = None
        self._say, self._patience_s = say, PATIENCE_S if patience_s is None else patience_s
        self._entries: queue.Queue[tuple[int, Scalars, Pictures] | tuple[Status, Mapping[str, Any]]]
        self._entries = queue.Queue(_MOST_WAITING)
        self._lock, self._opened = threading.Lock(), threading.Event()
        self._failed, self._where = False, ""
        self._last, self._marks = logged_step, dict[str, float]()
        # A daemon: a tracker that hangs must not keep the process from leaving.
        self._thread = threading.Thread(target=self._work, args=(open_run,), name=title, daemon=True)
        self._thread.start()
        if not self._opened.wait(self._patience_s):
            self._give_up(f"it did not open within {self._patience_s:g} s")

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Sends a step, unless the tracker holds it already."""
        if step <= self._last:
            return
        self._last = step
        self._put((step, {**scalars, **self._marks}, dict(pictures)))
        self._marks.clear()

    def go_back(self, step: int) -> None:
        """Marks a rollback at the next step that is sent."""
        self._marks[ROLLED_BACK] = step

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Sends the summary and waits for the end of it all, for a bounded time."""
        self._put((status, summary))
        self._thread.join(0 if self._failed else self._patience_s)
        if self._thread.is_alive():
            self._give_up(f"it did not take all within {self._patience_s:g} s of the end")

    def look(self) -> list[str]:
        """Returns the command or the URL that shows the run."""
        return [f"  {self.title:<9} {self._where}"] if self._where else []

    def _put(self, entry: Any) -> None:
        if self._failed:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._give_up(f"it is {_MOST_WAITING:,} log steps behind")

    def _work(self, open_run: Callable[[], RemoteRun]) -> None:
        """Runs in the thread."""
        try:
            run = open_run()
            self._where, self.run_id = run.where, run.run_id
            self._last = self._last if run.last_step is None else run.last_step
            self._opened.set()
            while not self._failed:
                entry = self._entries.get()
                if len(entry) == 2:
                    run.finish(*entry)
                    return
                run.log(*entry)
        # Whatever a package raises, SystemExit too, ends here.
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error_reason(error)}")
        finally:
            self._opened.set()

    def _give_up(self, reason: str) -> None:
        """Warns once, and sends no more."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
        self._say(
            f"warning: {self.title} gets no more of this run: {_without_secrets(reason)}; training continues"
        )


def _without_secrets(text: str) -> str:
    """Blanks out keys, passwords and tokens of the environment."""
    secrets = [os.environ.get(name, "") for name in _SECRETS]
    for url in (os.environ.get(name, "") for name in _URLS):
        secrets.append(urlsplit(url).netloc.rpartition("@")[0])
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return text
