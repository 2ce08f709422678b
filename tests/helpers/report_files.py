"""What tests of a run's page share: a small run, and its files."""

import json

from helpers.commands import ROOT, SMALL_PRETRAIN

from mae_vit.pretraining.command import main as pretrain
from mae_vit.pretraining.report.page import write_page
from mae_vit.pretraining.report.run_record import read_run


def train(digits, folder, *options):
    """Trains a small run of six steps; returns the exit code."""
    config = str(ROOT / "configs" / "pretrain" / "mae_digits.yaml")
    return pretrain(
        ["--config", config, *SMALL_PRETRAIN, f"data.path={digits}", f"run.dir={folder}", *options]
    )


def page_of(folder) -> str:
    """The page of a run folder."""
    return write_page(read_run(folder))


def change(path, **values):
    """Sets values in a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))
