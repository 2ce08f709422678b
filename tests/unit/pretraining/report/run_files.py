"""What tests of a run's page share: a small run, and its files."""

import json

from helpers.commands import ROOT, SMALL_PRETRAIN

from mae_vit.pretraining import reference_curves
from mae_vit.pretraining.job import main as pretrain
from mae_vit.pretraining.report.page import write_page
from mae_vit.pretraining.report.run_record import read_run
from mae_vit.pretraining.report.verdict import compare


def train(digits, folder, *options):
    """Trains a small run of six steps; returns the exit code."""
    config = str(ROOT / "configs" / "mae_digits.yaml")
    return pretrain(
        ["--config", config, *SMALL_PRETRAIN, f"data.path={digits}", f"run.dir={folder}", *options]
    )


def refer_to(monkeypatch, curves):
    """Takes reference curves from the folder `curves` alone."""
    monkeypatch.setattr(reference_curves.read_references, "__defaults__", (curves,))


def page_of(folder) -> str:
    """The page of a run folder."""
    record = read_run(folder)
    return write_page(record, compare(record))


def change(path, **values):
    """Sets values in a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))
