"""Weights & Biases and MLflow as trackers of a run; imported only by runs that name one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from filelock import FileLock

from mae_vit.training.identity import flatten
from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers import Pictures, Scalars, TrackedRun, Tracker

# Longest time that training waits for the package at start and end.
_PATIENCE_S = 20.0
_EXIT_CODES: dict[Status, int] = {"done": 0, "interrupted": 75}


class WandbTracker(Tracker):
    """A run in Weights & Biases: online with a key or a login, otherwise offline in the run folder.

    Charts use the metric "step" as x-axis: the package's own step only grows, so it would drop steps that
    repeat after a rollback or a resume.
    """

    title = "wandb"

    def __init__(self, run: TrackedRun) -> None:
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
        self.where = self._run.url or f"wandb sync {quote(str(run.folder / 'wandb'))}/offline-run-*"

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores a step as one row."""
        images = {name: self._image(picture) for name, picture in pictures.items()}
        self._run.log({"step": step, **scalars, **images})

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the summary; an interrupted run is shown as preempted."""
        flat = flatten({"summary": {**summary, "status": status}}, separator="/")
        self._run.summary.update(flat)
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))


_DEFAULTS = {
    # MLflow would report usage over the network.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Training waits for the server's answer; MLflow's defaults are 120 s and seven retries.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_STATUS: dict[Status, str] = {"done": "FINISHED", "interrupted": "KILLED"}
# Largest number that a server accepts in one request.
_MAX_PARAMETERS = 100


class MlflowTracker(Tracker):
    """A run in MLflow: on the server of MLFLOW_TRACKING_URI, or else in a database beside the runs.

    A repeated step has both values in its history.
    """

    title = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        """Opens the run; creates a new one if the store does not know its id (on another machine)."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient, entities, exceptions

        # After the import, which sets these levels.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = entities.Metric
        server, local = os.environ.get("MLFLOW_TRACKING_URI"), _local_folder(run.folder)
        uri = server or f"sqlite:///{local / 'mlflow.db'}"
        # Two runs that start together must not create the tables twice.
        with nullcontext() if server else FileLock(local / ".mlflow.lock"):
            self._client: Any = MlflowClient(tracking_uri=uri)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mae-vit")
            artifacts = None if server else (local / "mlflow-artifacts").as_uri()
            try:
                experiment = self._client.create_experiment(name, artifact_location=artifacts)
            except exceptions.MlflowException:  # it exists
                experiment = self._client.get_experiment_by_name(name).experiment_id
        self.where = f"experiment {experiment}" if server else f"mlflow ui --backend-store-uri {quote(uri)}"
        if run.run_id is not None:
            try:
                self._client.update_run(run.run_id, status="RUNNING")
                self.run_id = run.run_id
                return
            except exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [entities.Param(key, str(value)) for key, value in run.config.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self.run_id, params=parameters[first : first + _MAX_PARAMETERS])

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores a step's metrics in one request, then its pictures."""
        now = int(1000 * time.time())
        metrics = [self._metric(name, float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self.run_id, metrics=metrics)
        for name, picture in pictures.items():
            self._client.log_image(self.run_id, np.ascontiguousarray(picture), key=name, step=step)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the summary: numbers of a finished run as metrics, other values as tags, which can be replaced."""
        flat = flatten({"summary": {**summary, "status": status}}, separator="/")
        numbers = {name: value for name, value in flat.items() if isinstance(value, int | float)}
        if status == "done":
            self.log(int(summary.get("steps", 0)), numbers, {})
        for name, value in flat.items():
            if name not in numbers and value is not None:
                self._client.set_tag(self.run_id, name, str(value))
        self._client.set_terminated(self.run_id, _STATUS.get(status, "FAILED"))


def _local_folder(run: Path) -> Path:
    """Returns the ancestor folder named `runs`, so that all runs share a database; by default the run's parent."""
    above = run.absolute().parents
    return next((folder for folder in above if folder.name == "runs"), above[0])
