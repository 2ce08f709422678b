"""Is a run normal: what is compared, where a run leaves a band, and what is said of it."""

import json
from dataclasses import replace

import pytest
from helpers.commands import ROOT, SMALL_MAE, run

from mae_vit.cli.main import main
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.pretraining import reference_curves
from mae_vit.pretraining.job import main as pretrain
from mae_vit.pretraining.reference_curves import (
    ReferenceWatch,
    curves_of,
    deviations,
    nearest_reference,
    read_references,
    recipe_of,
)

SMALL = [
    *SMALL_MAE,
    "train.steps=12",
    "train.warmup_steps=1",
    "monitor.log_every_steps=1",
    "monitor.evaluate_every_steps=6",
    "monitor.evaluate_images=32",
    "monitor.probe_queries=0",
    "monitor.tensorboard=false",
]


def train(digits, folder, *options):
    config = str(ROOT / "configs" / "mae_digits.yaml")
    return pretrain(["--config", config, *SMALL, f"data.path={digits}", f"run.dir={folder}", *options])


@pytest.fixture(scope="module")
def folder(digits, tmp_path_factory):
    """Reference curves of two seeds of a small run, as `docs/tools/collect_curves.py` makes them."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        assert train(digits, folder / f"seed{seed}", f"run.seed={seed}") == 0
    made = run(
        "-c",
        "import sys; sys.path.insert(0, 'docs/tools'); import collect_curves, pathlib; "
        f"collect_curves.FOLDER = pathlib.Path({str(folder / 'curves')!r}); collect_curves.main()",
        "--name",
        "small",
        str(folder / "seed0"),
        str(folder / "seed1"),
    )
    assert made.returncode == 0, made.stderr
    return folder


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_is_averaged_over_whole_parts():
    lines = [{"step": step, "loss": float(step)} for step in range(1, 46)]
    lines[10]["loss"] = None  # fp16 has skipped it
    curve = curves_of(lines, 60)["loss"]
    assert curve.steps.tolist() == list(range(2, 46, 2))  # parts of two steps; the 46th step is not there
    assert curve.values[0] == 1.5
    assert curve.values[5] == 12.0
    assert curve.lines[:6].tolist() == [2, 2, 2, 2, 2, 1]


def test_seeds_of_the_reference_are_normal(folder):
    (reference,) = read_references(folder / "curves")
    assert (reference.name, reference.seeds, reference.total_steps) == ("small", (0, 1), 12)
    assert {"loss", "heldout.psnr_db"} <= set(reference.bands)
    for seed in (0, 1):
        outliers, compared = deviations(reference, lines_of(folder / f"seed{seed}"))
        assert outliers == []
        assert compared > 12  # all parts of the loss, and the held-out metrics


def test_a_run_that_leaves_the_band_is_named(folder):
    (reference,) = read_references(folder / "curves")
    lines = lines_of(folder / "seed0")
    for line in lines:
        if line["step"] >= 5:
            line["loss"] *= 3
    (outlier,), _ = deviations(reference, lines)
    assert (outlier.curve, outlier.step) == ("loss", 5)
    assert outlier.value > outlier.high
    assert "loss" in str(outlier)
    assert f"{outlier.value - outlier.high:+.3g}" in str(outlier)
    watch = ReferenceWatch(reference)
    said = [watch.check(line) for line in lines]
    assert [place + 1 for place, text in enumerate(said) if text] == [5]
    assert "said once" in said[4]


def test_parts_that_are_not_all_there_are_passed_over(folder):
    """A run that was resumed, or that logs less often: its means are of other steps."""
    (reference,) = read_references(folder / "curves")
    bands = {"loss": replace(reference.bands["loss"], lines=reference.bands["loss"].lines + 1)}
    lines = [line | {"loss": 99.0, "heldout": {}} for line in lines_of(folder / "seed0")]
    assert deviations(replace(reference, bands=bands), lines) == ([], 0)


def test_options_that_are_newer_than_the_reference_are_no_difference(folder, tmp_path):
    record = json.loads((folder / "curves" / "small.json").read_text())
    del record["recipe"]["objective.decode_ratio"]
    (tmp_path / "old.json").write_text(json.dumps(record))
    (old,), (new,) = read_references(tmp_path), read_references(folder / "curves")
    assert old.recipe == new.recipe
    assert old.recipe["objective.decode_ratio"] == 1.0


def test_another_recipe_is_another(folder):
    references = read_references(folder / "curves")
    config = parse_yaml((folder / "seed0" / "config.yaml").read_text(), "config")
    _, differing = nearest_reference(recipe_of(config), references)
    assert differing == []
    config["optim"]["lr"], config["run"]["seed"], config["monitor"]["log_every_steps"] = 5.0, 9, 3
    _, differing = nearest_reference(recipe_of(config), references)
    assert differing == ["optim.lr=5.0 (the reference has 0.001)"]


def refer_to(monkeypatch, curves):
    for name in ("read_references", "reference_watch"):
        monkeypatch.setattr(getattr(reference_curves, name), "__defaults__", (curves,))


def test_the_command_draws_and_judges(folder, monkeypatch, digits, tmp_path, capsys):
    refer_to(monkeypatch, folder / "curves")
    assert main(["curve", str(folder / "seed1")]) == 0
    output = capsys.readouterr().out
    assert "normal     within the band at all" in output
    ranks = [line["heldout"]["rankme"] for line in lines_of(folder / "seed1") if "heldout" in line]
    assert (
        f"features   effective rank (RankMe) {ranks[0]:.4g} at step 6, {ranks[-1]:.4g} at step 12; " in output
    )
    assert (folder / "seed1" / "curve.png").stat().st_size > 1000
    bad = tmp_path / "bad"
    assert train(digits, bad, "optim.lr=1e-7") == 0
    assert main(["curve", str(bad), "--out", str(tmp_path / "x.png")]) == 1
    out = capsys.readouterr().out
    assert "differs  optim.lr=1e-07 (the reference has 0.001)" in out
    assert "outside    loss" in out
    assert main(["curve", str(bad), "--preset", "smal"]) == 2
    assert 'did you mean "small"' in capsys.readouterr().err
    other = tmp_path / "other"
    assert train(digits, other, "objective.mask_ratio=0.5") == 0
    assert main(["curve", str(other)]) == 2
    assert "small comes nearest, and differs in objective.mask_ratio=0.5" in capsys.readouterr().err
    assert main(["curve", str(other), "--preset", "small"]) in (0, 1)
    assert main(["curve", str(tmp_path / "none")]) == 2
    (bad / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": None}) + "\n")
    assert main(["curve", str(bad)]) == 2
    assert "nothing in common" in capsys.readouterr().err


def test_training_says_it_once(folder, monkeypatch, digits, tmp_path, capsys):
    refer_to(monkeypatch, folder / "curves")
    assert train(digits, tmp_path / "normal", "run.seed=1") == 0
    assert "warning" not in capsys.readouterr().err
    # The same run where others had half its loss.
    record = json.loads((folder / "curves" / "small.json").read_text())
    record["curves"]["loss"]["values"] = [[v / 2 for v in one] for one in record["curves"]["loss"]["values"]]
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / "small.json").write_text(json.dumps(record))
    refer_to(monkeypatch, tmp_path / "curves")
    assert train(digits, tmp_path / "odd", "run.seed=1") == 0
    said = capsys.readouterr().err
    assert said.count("warning: loss") == 1
    assert "where runs of small lie (2 measured)" in said
    # Another recipe is compared with nothing.
    assert train(digits, tmp_path / "other", "optim.lr=1e-4") == 0
    assert "warning: loss" not in capsys.readouterr().err
