"""Whole comparisons on the digits: run, stopped, killed, and reported."""

import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.commands import ROOT, run

from mae_vit.config.load import load_config
from mae_vit.config.overrides import parse_yaml
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.main import main
from mae_vit.finetuning.comparison.matrix import Matrix
from mae_vit.finetuning.comparison.protocol import describe_changes, keep_protocol
from mae_vit.finetuning.comparison.report.predictions import read_scores
from mae_vit.finetuning.comparison.report.significance import gap_between
from mae_vit.pretraining.job import main as pretrain

# What differs from one machine, or one try, to the next.
TIME_COLUMNS = ("finetune_s", "pretrain_s")
MODEL = (
    "model.img_size: 8, model.patch_size: 2, model.in_chans: 1, "
    "model.embed_dim: 16, model.depth: 2, model.num_heads: 2"
)
CONFIG = """
run: {{name: small}}
data: {{path: {data}}}
set:
  model.img_size: 8
  model.in_chans: 1
  data.augment: {{crop: pad, pad_px: 1, flip: false}}
  train.steps: {steps}
  train.warmup_steps: 1
  train.effective_batch_size: 32
  monitor.log_every_steps: 1
  monitor.evaluate_every_steps: 2
  monitor.tensorboard: false
  checkpoint.every_steps: 2
pretrain:
  MAE:
    config: {configs}/mae_digits.yaml
    set: {{{model}, objective.decoder_embed_dim: 16, objective.decoder_depth: 1, objective.decoder_num_heads: 2,
          train.engine: torch, train.steps: {steps}, train.warmup_steps: 1, monitor.tensorboard: false,
          checkpoint.every_steps: 2, monitor.evaluate_every_steps: 3, monitor.evaluate_images: 64}}
entries:
  - {{name: ViT from scratch, config: {configs}/finetune_cifar_tiny.yaml, set: {{{model}}}}}
  - {{name: ViT from MAE, config: {configs}/finetune_cifar_tiny.yaml, start: MAE, modes: [finetune, few_shot]}}
  - {{name: SimpleCNN, config: {configs}/simple_cnn_cifar.yaml, tune: [{{optim.lr: 2e-3}}, {{optim.lr: 4e-3}}]}}
{as_long}reference: ViT from scratch
labels_per_class: [25]
seeds: [0]
tune: [{{optim.lr: 1e-3}}, {{optim.lr: 3e-3}}]
test_subset: 50
parallel: 2
"""


AS_LONG = """\
  - {{name: as long as MAE, config: {configs}/finetune_cifar_tiny.yaml, set: {{{model}}}, compute_of: ViT from MAE}}
"""


def write_config(folder: Path, data: Path, *, steps: int, as_long: bool = True) -> Path:
    path = folder / "small.yaml"
    values = {"data": data, "configs": ROOT / "configs", "steps": steps, "model": MODEL}
    path.write_text(CONFIG.format(as_long=AS_LONG.format(**values) if as_long else "", **values))
    return path


def command(config: Path, folder: Path, *more: str) -> list[str]:
    return ["finetune/compare.py", "--config", str(config), f"run.dir={folder}", *more]


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return [
            {key: value for key, value in line.items() if key not in TIME_COLUMNS}
            for line in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def compared(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    config = write_config(folder, digits, steps=6, as_long=False)
    done = run(*command(config, folder / "run"), timeout=500)
    assert done.returncode == 0, done.stderr
    return config, folder / "run", done


def test_the_table_tells_what_the_runs_found(compared):
    _, folder, done = compared
    lines = read(folder)
    assert [(line["entry"], line["mode"]) for line in lines] == [
        ("ViT from scratch", "finetune"),
        ("ViT from MAE", "finetune"),
        ("ViT from MAE", "few_shot"),
        ("SimpleCNN", "finetune"),
    ]
    assert str(folder / "report.html") in done.stdout
    for line in lines[:2]:
        entry = line["entry"].lower().replace(" ", "-")
        (summary,) = (folder / "cells" / entry).glob("finetune-*/summary.json")
        run_summary = json.loads(summary.read_text())
        assert float(line["test_top1"]) == run_summary["test_top1"]
        assert (run_summary["train_size"], run_summary["val_size"], run_summary["test_size"]) == (
            220,
            30,
            300,
        )


def test_settings_are_chosen_on_held_out_images_alone(compared):
    _, folder, _ = compared
    for entry, rates in {"vit-from-scratch": (1e-3, 3e-3), "simplecnn": (2e-3, 4e-3)}.items():
        summaries = [
            json.loads(
                (folder / "tune" / entry / f"labels-25-setting-{n}-seed-1000/summary.json").read_text()
            )
            for n in range(2)
        ]
        assert all("test_top1" not in one for one in summaries)
        assert not list((folder / "tune").rglob("predictions.csv"))
        best = max(range(2), key=lambda number: summaries[number]["val_top1"])
        (cell,) = (folder / "cells" / entry).glob("finetune-*/config.yaml")
        assert f"lr: {rates[best]}" in cell.read_text()


def test_the_page_needs_nothing_beside_it(compared):
    _, folder, _ = compared
    page = (folder / "report.html").read_text()
    # But for a link to more, which lies beside it.
    link = '<a href="inspect/index.html">'
    assert page.count(link) == 1
    assert "Mean attention distance" in (folder / "inspect" / "index.html").read_text()
    page = page.replace(link, "")
    assert not re.search(r'(src|href)="(?!data:|#)', page.replace('xlink:href="#', 'href="#'))
    assert "ViT from MAE" in page
    assert page.count("<svg") >= 2
    assert re.search(r"On 250 labeled images, ViT from scratch reaches [0-9.]+ % of 300 test images", page)
    assert "on the test images (300, split test)" in page
    # In the table, and set against each of the others.
    assert (folder / "report.md").read_text().count("\n| ViT from scratch | ") == 2
    assert "Each against each" in page


def test_equal_compute_is_counted_in_steps(digits, tmp_path):
    """100 of pretraining and 6 x 7 of fine-tuning, at 10 a step: 15 steps."""
    path = write_config(tmp_path, digits, steps=6)
    content = parse_yaml(path.read_text(), "")
    scratch, mae, _, as_long = content["entries"]
    content |= {"entries": [scratch, mae | {"modes": ["finetune"]}, as_long], "tune": []}
    path.write_text(json.dumps(content))
    matrix = Matrix(load_config(CompareConfig, path), tmp_path, tmp_path / "run")
    cells = {cell.entry.name: cell.job.folder for cell in matrix.cells(compute_of=False)}
    summaries = {
        matrix.pretraining["MAE"].folder: {"steps": 20, "flops_per_step": 5.0},
        cells["ViT from MAE"]: {"steps": 6, "flops_per_step": 7.0},
        cells["ViT from scratch"]: {"steps": 6, "flops_per_step": 10.0},
    }
    for folder, summary in summaries.items():
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(summary))
    (longer,) = matrix.cells(compute_of=True)
    assert longer.entry.name == "as long as MAE"
    assert "train.steps=15" in longer.job.arguments


def test_again_it_has_nothing_to_do(compared, capsys):
    config, folder, _ = compared
    before = (folder / "results.csv").read_bytes(), (folder / "report.html").read_bytes()
    logs = {path: path.stat().st_mtime_ns for path in folder.rglob("*.log")}
    assert main(command(config, folder)[1:]) == 0
    assert ((folder / "results.csv").read_bytes(), (folder / "report.html").read_bytes()) == before
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.log")} == logs


def test_other_settings_in_the_same_folder_are_refused(compared, capsys):
    config, folder, _ = compared
    before = (folder / "results.csv").read_bytes()
    changed = config.with_name("changed.yaml")
    changed.write_text(config.read_text().replace("effective_batch_size: 32", "effective_batch_size: 16"))
    assert main(command(changed, folder)[1:]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "was run with another set of options" in line
    assert "(then train.effective_batch_size=32, now train.effective_batch_size=16)" in line
    assert (folder / "results.csv").read_bytes() == before


@pytest.mark.slow
def test_nothing_begins_from_a_finished_run_that_is_another(digits, tmp_path, capfd):
    """Its folder holds a whole encoder, of fewer steps than the comparison asks for."""
    config = write_config(tmp_path, digits, steps=2)
    content = parse_yaml(config.read_text(), "")
    mae = content["pretrain"]["MAE"] | {"dir": str(tmp_path / "mae")}
    settings = [f"{key}={json.dumps(value)}" for key, value in mae["set"].items()]
    place = [f"data.path={digits}", f"run.dir={mae['dir']}"]
    assert pretrain(["--config", mae["config"], *settings, *place]) == 0
    mae["set"]["train.steps"] = 3
    scratch, from_mae, _, as_long = content["entries"]
    entries = [scratch, from_mae | {"modes": ["finetune"]}, as_long]
    config.write_text(json.dumps({**content, "pretrain": {"MAE": mae}, "entries": entries, "tune": []}))
    capfd.readouterr()
    assert main(command(config, tmp_path / "run")[1:]) == 1
    assert "failed: pretrain MAE: exit 2" in capfd.readouterr().err
    assert {line["entry"] for line in read(tmp_path / "run")} == {"ViT from scratch"}
    report = (tmp_path / "run" / "report.md").read_text()
    (missing,) = [line for line in report.splitlines() if line.startswith("Not finished: ")]
    assert "ViT from MAE, 25 labels, finetune, seed 0" in missing
    assert "as long as MAE" in missing


WRONG = {
    "unknown reference": (
        "reference: ViT from scratch",
        "reference: ViT from scrach",
        'did you mean "ViT from scratch"?',
    ),
    "own key": (
        "  train.steps:",
        "  run.seed: 3\n  train.steps:",
        '"run.seed" is given by the comparison (seeds)',
    ),
    "uneven budget": (
        "[{optim.lr: 2e-3}, {optim.lr: 4e-3}]",
        "[{optim.lr: 2e-3}]",
        "give all the same number",
    ),
    "unknown key of a run": ("  model.img_size: 8\n", "  model.img_sise: 8\n", '"model.img_size"'),
    "as long, in another mode": (
        "compute_of: ViT from MAE",
        "compute_of: ViT from MAE, modes: [finetune, few_shot]",
        'compute_of: "as long as MAE" trains as long as another: not in mode few_shot',
    ),
    "a way of measuring that one entry has not": (
        "test_subset: 50",
        "modes: [finetune, knn]",
        'set: finetune.mode="knn" needs a Vision Transformer, not "SimpleCNN" (or give this entry modes of its own',
    ),
    "missing data": ("data: {path: ", "data: {path: no", "does not exist"),
    "more labels than there are": (
        "labels_per_class: [25]",
        "labels_per_class: [100000]",
        "labels_per_class: 100000 is more than any class",
    ),
    "config named from elsewhere": (
        f"{ROOT}/configs/simple_cnn_cifar.yaml",
        "configs/simple_cnn_cifar.yaml",
        'config "configs/simple_cnn_cifar.yaml" is looked for beside the comparison',
    ),
    "missing file": ("simple_cnn_cifar.yaml", "simple_cnn.yaml", "cannot read config"),
    "seed of tuning": ("seeds: [0]", "seeds: [1000]", "tune_seeds"),
    "seed of tuning, of one entry": ("modes: [finetune, few_shot]}", "seeds: [1000]}", "tune_seeds"),
    "two of a name": ("name: SimpleCNN", "name: ViT-from scratch", "two are called"),
}


def test_one_option_of_a_comparison_is_changed_by_its_dotted_name(digits, tmp_path):
    path = write_config(tmp_path, digits, steps=2)
    before = load_config(CompareConfig, path)
    words = [
        "set.train.epochs=3",
        "set.data.augment.flip=true",
        "set.train.warmup_epochs=null",
        "pretrain.MAE.set.train.steps=5",
    ]
    changed = load_config(CompareConfig, path, [*words, "pretrain.MAE.set.train.engine=null"])
    # null unsets it in the runs too, and takes nothing with it.
    more = {"train.epochs": 3, "data.augment.flip": True, "train.warmup_epochs": None}
    expected = {**before.set, **more}
    del expected["train.steps"]  # another way of giving the same
    assert changed.set == expected
    settings = {**before.pretrain["MAE"].set, "train.steps": 5}
    del settings["train.engine"]
    assert changed.pretrain["MAE"].set == settings


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line(digits, tmp_path, capsys, name):
    config = write_config(tmp_path, digits, steps=2)
    old, new, expected = WRONG[name]
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new, 1))
    assert main(command(config, tmp_path / "run")[1:]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert expected in errors[0]
    assert not (tmp_path / "run").exists()


def start(config: Path, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command(config, folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(folder: Path, pattern: str, process: subprocess.Popen) -> None:
    for _ in range(3000):
        if any(folder.glob(pattern)) or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing at {pattern}")


@pytest.mark.slow
@pytest.mark.distributed
def test_stopped_it_saves_and_goes_on(digits, tmp_path):
    config = write_config(tmp_path, digits, steps=400)
    folder = tmp_path / "run"
    process = start(config, folder)
    try:
        wait_for(folder, "pretrain/mae/checkpoints/latest", process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, process.stderr.read()
        assert psutil.wait_procs(children, timeout=10)[1] == []
    finally:
        process.kill()
    assert json.loads((folder / "pretrain/mae/summary.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_killed_three_times_it_ends_with_the_same_table(digits, tmp_path):
    config = write_config(tmp_path, digits, steps=40)
    assert run(*command(config, tmp_path / "straight"), timeout=900).returncode == 0
    folder, chance = tmp_path / "killed", random.Random(0)
    for pattern in ("pretrain/mae/checkpoints/latest", "tune/*/*/metrics.jsonl", "cells/*/*/metrics.jsonl"):
        process = start(config, folder)
        try:
            wait_for(folder, pattern, process)
            time.sleep(3 * chance.random())
            family = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            # Nothing goes on that a second comparison could meet.
            assert psutil.wait_procs(family, timeout=20)[1] == []
        finally:
            process.kill()
    assert run(*command(config, folder), timeout=900).returncode == 0
    assert read(folder) == read(tmp_path / "straight")
    assert_equal_compute_is_equal(read(folder))


def assert_equal_compute_is_equal(table: list[dict[str, str]]) -> None:
    lines = {(line["entry"], line["mode"]): line for line in table}
    theirs, ours = lines["ViT from MAE", "finetune"], lines["as long as MAE", "finetune"]
    total = float(theirs["finetune_flops"]) + float(theirs["pretrain_flops"])
    assert total == pytest.approx(float(ours["finetune_flops"]), rel=0.02)  # whole steps
    assert float(ours["pretrain_flops"]) == 0


def test_gaps_are_computed_again_from_the_published_files(compared):
    """`results.csv` and `predictions.npz` give every gap that `report.md` prints."""
    _, folder, _ = compared
    scores = read_scores(folder)
    reference = scores["ViT from scratch", "25", "finetune"]
    lines = [line.split(" | ") for line in (folder / "report.md").read_text().splitlines()]
    printed = {line[0].removeprefix("| "): line for line in lines if len(line) > 4}
    column = printed["entry"].index("gap, points")
    for entry in ("ViT from MAE", "SimpleCNN"):
        gap = gap_between(scores[entry, "25", "finetune"], reference)
        assert any(line[column] == gap.in_brackets() for line in lines if line[0] == f"| {entry}")
    by_cell = {(line["entry"], line["mode"]): float(line["test_top1"]) for line in read(folder)}
    for (entry, _, mode), runs in scores.items():
        assert runs[0].correct.mean() == pytest.approx(by_cell[entry, mode])


def test_a_row_says_what_it_was_made_of(compared):
    _, folder, _ = compared
    lines = read(folder)
    for name in ("torch", "hardware", "precision", "data", "test_data", "train_images"):
        assert all(line[name] for line in lines), name
    tuned = [line for line in lines if line["mode"] == "finetune"]
    assert len({line["train_images"] for line in tuned}) == 1, "the same labels in every row"
    assert {line["test_reads"] for line in tuned} == {"1"}


def test_settings_that_change_after_test_results_are_reported(compared, tmp_path):
    config, folder, _ = compared
    shutil.copytree(folder, tmp_path / "run")
    with_more = config.with_name("more.yaml")
    with_more.write_text(config.read_text().replace("test_subset: 50", "test_subset: 40"))
    protocol = tmp_path / "run" / "protocol.json"
    assert json.loads(protocol.read_text())["changes"] == []
    for _ in range(2):
        keep_protocol(tmp_path / "run", load_config(CompareConfig, with_more, []), tested=4)
    (sentence,) = describe_changes(tmp_path / "run")
    assert sentence.startswith("Settings were changed after test results were read (")
    assert sentence.endswith(", 4 cells): test_subset.")
    # A key that an earlier version did not have is no change.
    kept = json.loads(protocol.read_text())
    del kept["settings"]["label_draws"]
    protocol.write_text(json.dumps(kept))
    keep_protocol(tmp_path / "run", load_config(CompareConfig, with_more, []), tested=4)
    assert len(describe_changes(tmp_path / "run")) == 1
