"""Reads what experiment trackers have stored, by their own clients."""

import os
from dataclasses import dataclass
from pathlib import Path


def wandb_ids(folder: Path) -> list[str]:
    """Run ids of the offline parts that lie in a run folder, in order."""
    return [path.name.rpartition("-")[2] for path in sorted(folder.glob("wandb/offline-run-*"))]


@dataclass
class StoredByMlflow:
    """A run in an MLflow store."""

    client: object
    run_id: str
    name: str
    group: str | None
    status: str
    parameters: dict
    pictures: list

    def values(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, in order of the steps; a step that came again has two."""
        history = self.client.get_metric_history(self.run_id, name)
        return sorted((metric.step, metric.value) for metric in history)


def stored_by_mlflow(database: Path) -> list[StoredByMlflow]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return [
        StoredByMlflow(
            client,
            run.info.run_id,
            run.info.run_name,
            run.data.tags.get("group"),
            run.info.status,
            run.data.params,
            [file.path for file in client.list_artifacts(run.info.run_id, "images")],
        )
        for run in runs
    ]
