"""Logs a run to Weights & Biases. The only file that imports wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers.base import ROLLED_BACK, Pictures, Scalars, TrackedRun, flatten

# Longest time that training waits for the package at start and end.
_PATIENCE_S = 20.0
_EXIT_CODES: dict[Status, int] = {"done": 0, "interrupted": 75}


class WandbTracker:
    """A run in Weights & Biases: online with a key or a login, otherwise offline in the run folder.

    Charts use the metric "step" as x-axis: the package's own step only grows, so it would drop steps that
    repeat after a rollback or a resume.
    """

    title = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        """Opens the run."""
        # Otherwise the package prints, and reports its own errors over the network.
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # The service of a parent process, such as a notebook, would consider a killed process's run in use.
        os.environ.pop("WANDB_SERVICE", None)
        import wandb

        has_login = bool(os.environ.get("WANDB_MODE")) or wandb.login(prompt=False, verify=False)
        self._image = wandb.Image
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mae-vit"),
            name=run.name,
            group=run.group,
            id=run.run_id,
            dir=str(run.folder),
            config=dict(run.config),
            mode=None if has_login else "offline",
            resume="allow",
            # Do not collect the command line and the git remote: they may hold tokens.
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
        self._run.define_metric("*", step_metric="step")
        self.run_id = self._run.id
        self.where = self._run.url or f"wandb sync {run.folder / 'wandb'}/offline-run-*"

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores a step as one row."""
        images = {name: self._image(picture) for name, picture in pictures.items()}
        self._run.log({"step": step, **scalars, **images})

    def go_back(self, step: int) -> None:
        """Marks a rollback at the first step after it."""
        self.log(step + 1, {ROLLED_BACK: step}, {})

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the summary; an interrupted run is shown as preempted."""
        flat = flatten({"summary": {**summary, "status": status}}, separator="/")
        self._run.summary.update(flat)
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))
