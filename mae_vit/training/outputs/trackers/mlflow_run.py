"""Opens and resumes a run of MLflow. The only file that imports its package."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers.base import Pictures, Scalars, TrackedRun, flatten
from mae_vit.training.outputs.trackers.names import IN_EVERY_LINE

_STATUS: dict[Status, str] = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# A server takes no more in one request.
_PARAMETERS_AT_ONCE = 100


class MlflowRun:
    """A run of MLflow: on the server of MLFLOW_TRACKING_URI, in a database beside the runs without one.

    MLflow keeps a second value of the same step beside the first.
    """

    def __init__(self, run: TrackedRun, run_id: str | None) -> None:
        """Opens a run, or resumes the one of `run_id` if the store knows it."""
        # It reports its use over the network by default.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient, entities
        from mlflow.exceptions import MlflowException

        # After the import, which sets levels itself.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._entities, self._errors = entities, MlflowException
        server = os.environ.get("MLFLOW_TRACKING_URI")
        local = _local_folder(run.folder)
        # Two runs that begin together must not create the tables twice.
        with nullcontext() if server else FileLock(local / ".mlflow.lock"):
            uri = server or f"sqlite:///{local / 'mlflow.db'}"
            self._client: Any = MlflowClient(tracking_uri=uri)
            experiment = self._experiment(None if server else (local / "mlflow-artifacts").as_uri())
        self.where = f"mlflow ui --backend-store-uri {uri}" if not server else f"experiment {experiment}"
        self.last_step: int | None
        self.run_id, self.last_step = self._resume(run_id) or self._create(run, experiment)

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores a step's metrics in one request, then its pictures."""
        self._client.log_batch(self.run_id, metrics=self._metrics(scalars, step))
        for name, picture in pictures.items():
            self._client.log_image(self.run_id, np.ascontiguousarray(picture), key=name, step=step)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the summary: numbers of a finished run as metrics, the rest as tags, which can be replaced."""
        flat = {f"summary/{name}": value for name, value in flatten(summary, separator="/").items()}
        numbers = {name: value for name, value in flat.items() if _is_number(value)}
        if status == "done":
            self._client.log_batch(self.run_id, metrics=self._metrics(numbers, int(summary.get("steps", 0))))
        tags = {name: value for name, value in flat.items() if name not in numbers and value is not None}
        for name, value in {**tags, "summary/status": status}.items():
            self._client.set_tag(self.run_id, name, str(value))
        self._client.set_terminated(self.run_id, _STATUS.get(status, "FAILED"))

    def _experiment(self, artifacts: str | None) -> str:
        """Returns the experiment's id; creates it if there is none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mae-vit")
        for _ in range(2):
            if (known := self._client.get_experiment_by_name(name)) is not None:
                return str(known.experiment_id)
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except self._errors:  # another run was faster
                continue
        raise RuntimeError(f'experiment "{name}" can be neither created nor read')

    def _resume(self, run_id: str | None) -> tuple[str, int] | None:
        """Reopens a run; returns its id and the last step that it holds, None if the store does not know it."""
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except self._errors as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None  # a local store of another machine
        history = self._client.get_metric_history(run_id, IN_EVERY_LINE)
        return run_id, max((metric.step for metric in history), default=0)

    def _create(self, run: TrackedRun, experiment: str) -> tuple[str, int]:
        tags = {"group": run.group} if run.group else {}
        created = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        # Parameters cannot be replaced: they state the run as it began.
        parameters = [self._entities.Param(key, str(value)) for key, value in run.config.items()]
        for begin in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(created, params=parameters[begin : begin + _PARAMETERS_AT_ONCE])
        return str(created), 0

    def _metrics(self, scalars: Scalars, step: int) -> list[Any]:
        now = int(1000 * time.time())
        return [self._entities.Metric(name, float(value), now, step) for name, value in scalars.items()]


def _local_folder(run: Path) -> Path:
    """The folder `runs` above a run, so that all runs share a database; without one, the folder above the run."""
    above = run.absolute().parents
    return next((folder for folder in above if folder.name == "runs"), above[0])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
