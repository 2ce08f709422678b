"""Reads what experiment trackers have stored, by their own clients."""

import os
from pathlib import Path
from types import SimpleNamespace


def wandb_ids(folder: Path) -> list[str]:
    """Run ids of the offline parts that lie in a run folder, in order."""
    return [path.name.rpartition("-")[2] for path in sorted(folder.glob("wandb/offline-run-*"))]


def stored_by_mlflow(database: Path) -> list[SimpleNamespace]:
    """The runs in an MLflow store; `values(metric)` has (step, value) in order of steps, two of a repeated step."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")

    def values_of(run_id: str, name: str) -> list[tuple[int, float]]:
        return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))

    return [
        SimpleNamespace(
            name=run.info.run_name,
            status=run.info.status,
            parameters=run.data.params,
            pictures=[file.path for file in client.list_artifacts(run.info.run_id, "images")],
            values=lambda name, run_id=run.info.run_id: values_of(run_id, name),
        )
        for run in client.search_runs([each.experiment_id for each in client.search_experiments()])
    ]
