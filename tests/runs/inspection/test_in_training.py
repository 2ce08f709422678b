"""Views while a run trains: they are written, and change nothing."""

import json
import shutil

import pytest
from helpers.commands import SMALL_MAE, lines_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mae_vit.pretraining.command import main

LENGTH = [
    "train.steps=6",
    "train.warmup_steps=1",
    "monitor.log_every_steps=1",
    "monitor.evaluate_images=32",
    "monitor.picture_images=4",
    "monitor.probe_queries=0",
]


def train(digits, folder, *options):
    return main(["mae_digits", *SMALL_MAE, *LENGTH, f"data.path={digits}", f"run.dir={folder}", *options])


def losses(folder):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines_of(folder)]


def test_views_are_written_and_change_nothing(digits, tmp_path):
    # 11 steps an epoch: after steps 3 and 6.
    assert train(digits, tmp_path / "with", "monitor.inspect_every_epochs=0.3") == 0
    assert train(digits, tmp_path / "without") == 0
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    weights = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]
    events = EventAccumulator(str(tmp_path / "with" / "tensorboard"))
    events.Reload()
    for name in ("attention-rollout", "attention-distance", "positions"):
        assert [image.step for image in events.Images(f"inspect/{name}")] == [3, 6]
    scalars = set(events.Tags()["scalars"])
    assert {"train/loss", "optimizer/lr", "speed/images_per_s", "speed/data_wait_frac"} <= scalars
    assert not any(name.startswith("train/lr") for name in scalars)
    events_without = EventAccumulator(str(tmp_path / "without" / "tensorboard"))
    events_without.Reload()
    assert not any(name.startswith("inspect/") for name in events_without.Tags()["images"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["monitor.tensorboard=false"], "tensorboard=false"), (["data.split=test"], "no split")],
)
def test_without_effect_it_is_refused(digits, tmp_path, capsys, options, reason):
    data = digits
    if "data.split=test" in options:
        # Of a folder that has nothing but what is trained on.
        data = shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".index"))
        described = json.loads((data / "dataset.json").read_text())
        del described["splits"]["train"]
        (data / "dataset.json").write_text(json.dumps(described))
    assert train(data, tmp_path / "run", "monitor.inspect_every_epochs=1", *options) == 2
    error = capsys.readouterr().err
    assert "inspect_every_epochs" in error
    assert reason in error
