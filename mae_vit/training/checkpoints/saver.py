"""Saves during training: ranks gather the state, a thread on rank 0 writes it, and all ranks learn of a failure."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mae_vit.config.schema import CheckpointSection
from mae_vit.core.errors import RemoteError
from mae_vit.core.messages import error_reason
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.ranks import broadcast_from_rank_zero
from mae_vit.runtime.slurm import mark_slurm_progress
from mae_vit.training.checkpoints.checkpoint import expired_checkpoints, list_checkpoints, save_checkpoint
from mae_vit.training.checkpoints.remote import RemoteRun
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.state import BestWeights, LossHistory, TrainState

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Waits for a write that are longer are reported.
_SLOW_S = 10.0
_NOT_FINITE = "left weights that are not finite"


class Saver:
    """Writes checkpoints. Every method must be called on every rank; rank 0 writes.

    If a save fails (a full, broken or read-only disk), the saver prints a warning and keeps the last
    good checkpoint. The next save tries again. After `checkpoint.max_failed_saves` failures in a
    row the run stops. On a full disk the saver removes older checkpoints before it gives up,
    but never the newest intact one. A run with a URL has saved once the checkpoint is there.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        options: CheckpointSection,
        *,
        identity: dict[str, Any],
        every_steps: int,
        say: Callable[[str], None],
        remote: RemoteRun | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Removes the leftovers of interrupted saves; only rank 0's `clock` counts."""
        self._engine, self._folder, self._options = engine, folder, options
        self._identity, self._every_steps = identity, every_steps
        self._say, self._remote = say, remote
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        # These have the same values on all ranks.
        self._pending, self._step = False, 0
        self._failures = 0
        self.stall_s = 0.0
        self._clock = clock
        self.restart_clock()
        if engine.ranks.rank == 0:
            for torn in folder.glob(".step-*.tmp"):
                shutil.rmtree(torn, ignore_errors=True)

    def restart_clock(self) -> None:
        """Restarts the clock of `checkpoint.every_minutes`."""
        self._saved_s = self._clock()

    def take_stall(self) -> dict[str, float]:
        """Returns `stall_s` as a metric and resets it; empty if training did not wait."""
        stall, self.stall_s = self.stall_s, 0.0
        return {"save_stall_s": stall} if stall else {}

    def due(self) -> bool:
        """Returns whether `checkpoint.every_minutes` have passed since the last save; False on ranks other than 0.

        The step report carries the decision to them. No save is due during a write: training would wait for both.
        """
        minutes = self._options.every_minutes
        if minutes is None or self._engine.ranks.rank != 0:
            return False
        writing = self._thread is not None and self._thread.is_alive()
        return not writing and self._clock() - self._saved_s >= 60 * minutes

    def save(self, step: int, best: BestWeights | None, course: LossHistory, *, wait: bool) -> bool:
        """Saves the state after `step`; collective.

        Raises:
            BadStep: on all ranks, if this state or the previous one is not finite.
            TrainingFailed: on all ranks, after too many failures in a row.
        """
        begun = time.monotonic()
        # Wait first: host memory need not hold two states.
        self.wait()
        state = self._engine.gather()
        state.best, state.course = best, course
        self._pending, self._step = True, step
        self.restart_clock()
        if self._engine.ranks.rank == 0:
            # Not a daemon thread: the interpreter waits for it at exit.
            self._thread = threading.Thread(target=self._write, args=(step, state), name="saver")
            self._thread.start()
        good = not wait or self.wait()
        self.stall_s += time.monotonic() - begun
        return good

    def wait(self) -> bool:
        """Waits for the current write; returns False on all ranks if it failed; collective. Raises as `save` does."""
        if not self._pending:
            return True
        self._pending = False
        self.close()
        problem = broadcast_from_rank_zero(self._problem, self._engine.ranks)
        if problem == _NOT_FINITE:
            raise BadStep(self._step, problem)
        if problem is None:
            self._failures = 0
            return True
        self._failures += 1
        if self._failures >= self._options.max_failed_saves:
            raise TrainingFailed(
                f"{self._failures} saves in a row failed, the last one: {problem}; keeping the last good "
                "checkpoint (checkpoint.max_failed_saves)"
            )
        self._say(f"warning: {problem}; continuing with the last good checkpoint ({self._failures} in a row)")
        return False

    def close(self) -> None:
        """Waits for rank 0's current write; not collective."""
        if self._thread is None:
            return
        begun = time.monotonic()
        self._thread.join()
        self._thread = None
        if (waited := time.monotonic() - begun) > _SLOW_S:
            self._say(f"training waited {waited:.0f} s for a checkpoint to be written")

    def _write(self, step: int, state: TrainState) -> None:
        """Writes a checkpoint in the thread; stores any error in `_problem`."""
        try:
            if not state.is_finite():
                self._problem = _NOT_FINITE
                return

            save = partial(save_checkpoint, self._folder, step=step, state=state, identity=self._identity)
            try:
                path = save()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._prune(step, keep_last=1, there=False)
                path = save()
            if self._remote is not None:
                try:
                    # The metrics that lead to it first.
                    self._remote.upload_files()
                    self._remote.upload_checkpoint(path)
                except OSError:
                    # Otherwise nodes that do not have it would be asked to load it.
                    shutil.rmtree(path)
                    raise
            if step:
                mark_slurm_progress()
            # A stop saves even what may turn out bad: the checkpoints before it stay.
            if not state.course.streak:
                self._prune(step, keep_last=self._options.keep_last)
            self._problem = None
        except RemoteError as error:
            self._problem = f"the checkpoint of step {step}: {error}"
        except Exception as error:
            reason = error_reason(error) if isinstance(error, OSError) else repr(error)
            self._problem = f"the checkpoint of step {step} cannot be written to {self._folder}: {reason}"

    def _prune(self, step: int, *, keep_last: int, there: bool = True) -> None:
        expired = partial(expired_checkpoints, upto=step, keep_last=keep_last, every_steps=self._every_steps)
        keep_every = self._options.keep_every
        if self._remote is not None:
            try:
                for path in expired(self._remote.checkpoints(), keep_every=keep_every) if there else ():
                    self._remote.remove(path.name)
            except RemoteError as error:
                self._say(f"warning: old checkpoints stay until the next save: {error}")
            keep_every = None  # the local copy is for this start of the run
        for path in expired(list_checkpoints(self._folder), keep_every=keep_every):
            shutil.rmtree(path, ignore_errors=True)
