"""Reads what experiment trackers have stored, by their own clients and file layouts."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class StoredByWandb:
    """Rows of all offline files of a run folder, in order of their start."""

    ids: set = field(default_factory=set)
    name: str = ""
    group: str = ""
    steps: list = field(default_factory=list)
    values: dict = field(default_factory=dict)  # by name, then by step
    summary: dict = field(default_factory=dict)


def stored_by_wandb(folder: Path) -> StoredByWandb:
    from wandb.proto.wandb_internal_pb2 import Record

    from mae_vit.training.outputs.trackers.wandb_run import _records

    stored = StoredByWandb()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for content in _records(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                stored.ids.add(record.run.run_id)
                stored.name, stored.group = record.run.display_name, record.run.run_group
            if record.HasField("history"):
                step = record.history.step.num
                stored.steps.append(step)
                for item in record.history.item:
                    values = stored.values.setdefault(item.key or "/".join(item.nested_key), {})
                    assert step not in values
                    values[step] = json.loads(item.value_json)
            if record.HasField("summary"):
                for item in record.summary.update:
                    stored.summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return stored


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

    def steps(self, name: str) -> list[int]:
        return sorted(metric.step for metric in self.client.get_metric_history(self.run_id, name))

    def value(self, name: str, step: int) -> float:
        (value,) = [m.value for m in self.client.get_metric_history(self.run_id, name) if m.step == step]
        return value


def stored_by_mlflow(database: Path) -> list[StoredByMlflow]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    runs = client.search_runs([found.experiment_id for found in client.search_experiments()])
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
