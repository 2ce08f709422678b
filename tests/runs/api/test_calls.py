"""The commands as functions: runs in processes of their own give the same bits, and errors are raised."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import datasets
import numpy as np
import pandas
import PIL.Image
import pytest
import torch
from helpers.commands import ROOT, SMALL_PRETRAIN, lines_of, run, summary_of, wait_until
from helpers.images import write_files
from unit.data.band_files import chunky, values

import mae_vit
from mae_vit.cli.api import _REPEATED, _option_words, _overrides
from mae_vit.cli.main import parse
from mae_vit.pretraining.command import main

CHANGES = dict(word.split("=") for word in SMALL_PRETRAIN)
CHANGES = {key: json.loads(value) if value != "torch" else value for key, value in CHANGES.items()}


@pytest.fixture
def changes(digits, tmp_path):
    return {**CHANGES, "data.path": digits, "run.dir": tmp_path / "run"}


@pytest.fixture(scope="module")
def commanded(digits, tmp_path_factory):
    """The encoder that the command leaves."""
    folder = tmp_path_factory.mktemp("commanded") / "run"
    assert main(["mae_digits", f"data.path={digits}", f"run.dir={folder}", *SMALL_PRETRAIN]) == 0
    return folder


def encoder_bytes(folder):
    return (folder / "encoder.safetensors").read_bytes()


def test_a_call_trains_the_bits_of_the_command(changes, commanded, capsys, monkeypatch):
    # Settings of the caller that would change what a run computes.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    torch.set_default_dtype(torch.float64)
    try:
        run = mae_vit.pretrain("mae_digits", changes)
    finally:
        torch.set_default_dtype(torch.float32)
    out, err = capsys.readouterr()
    assert f"encoder   {run.path / 'encoder.safetensors'}" in out + err
    assert re.search(r"\r *\d+%\|.*6/6", err)  # the bar, as on a terminal
    assert encoder_bytes(run.path) == encoder_bytes(commanded)
    assert (run.summary["status"], run.summary["steps"]) == ("done", 6)
    assert run.metrics == lines_of(run.path)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run.rows == []
    assert isinstance(run.encoder(), mae_vit.PretrainedEncoder)


def test_a_mapping_is_a_config(changes, commanded):
    from mae_vit.config.typed_yaml import parse_yaml

    values = parse_yaml((commanded / "config.yaml").read_text(), "it")
    values["run"]["dir"] = changes["run.dir"]
    assert encoder_bytes(mae_vit.pretrain(values).path) == encoder_bytes(commanded)
    del values["run"]["name"]
    with pytest.raises(mae_vit.InputError, match=r'^config: "run\.name"'):
        mae_vit.pretrain(values)


@pytest.mark.parametrize(
    "changed", [{"train.step": 3}, {"train.steps": object()}, {"data.path": "nowhere"}], ids=",".join
)
def test_bad_input_is_raised_and_leaves_nothing(changes, capsys, changed, said):
    with pytest.raises(mae_vit.InputError) as error:
        mae_vit.pretrain("mae_digits", {**changes, "train.steps": None, **changed})
    said(error)
    assert capsys.readouterr().err == ""
    assert not changes["run.dir"].exists()


def then_at_step(folder, step, action):
    """Acts in a thread, once a run has logged a step."""

    def wait():
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step)
        action()

    threading.Thread(target=wait).start()


@pytest.fixture
def long(changes):
    never = {"checkpoint.every_steps": 1000, "monitor.evaluate_every_steps": 1000}
    return {**changes, **never, "train.steps": 100}


@pytest.mark.parametrize(
    ("number", "raised"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        pytest.param(signal.SIGTERM, mae_vit.RunInterrupted, marks=pytest.mark.slow),
    ],
)
def test_a_stop_saves_then_raises_and_the_same_call_resumes(long, tmp_path, number, raised):
    # Under tests SIGINT may be ignored, as in a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    then_at_step(long["run.dir"], 3, lambda: os.kill(os.getpid(), number))
    with pytest.raises(raised):
        mae_vit.pretrain("mae_digits", long)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert summary_of(long["run.dir"])["status"] == "interrupted"
    assert 3 <= summary_of(long["run.dir"])["steps"] < 100
    resumed = mae_vit.pretrain("mae_digits", long)
    straight = mae_vit.pretrain("mae_digits", {**long, "run.dir": tmp_path / "straight"})
    assert encoder_bytes(resumed.path) == encoder_bytes(straight.path)


SCRIPT = """
import mae_vit

run = mae_vit.pretrain("mae_digits", {changes})
print("steps", run.summary["steps"])
"""


def start_script(tmp_path, changes):
    words = {key: value if isinstance(value, int | bool) else str(value) for key, value in changes.items()}
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(changes=words))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_run_ends_with_its_caller(long, tmp_path):
    caller = start_script(tmp_path, {**long, "train.steps": 100_000, "train.warmup_steps": 2})
    then_at_step(long["run.dir"], 3, caller.kill)
    caller.wait()
    deadline = time.monotonic() + 60
    while summary_of(long["run.dir"])["status"] == "running":
        assert time.monotonic() < deadline, "it goes on as an orphan"
        time.sleep(0.1)
    assert summary_of(long["run.dir"])["status"] == "interrupted"


@pytest.mark.slow
def test_a_script_without_a_guard_has_data_workers(changes, commanded, tmp_path):
    """Workers are processes that would run the script again."""
    caller = start_script(tmp_path, {**changes, "data.workers": 2, "data.source": "tar"})
    output, _ = caller.communicate(timeout=500)
    assert caller.returncode == 0
    assert output.splitlines()[-1] == "steps 6"
    assert encoder_bytes(changes["run.dir"]) == encoder_bytes(commanded)


def test_a_process_that_dies_is_a_failed_run(changes, monkeypatch):
    monkeypatch.setattr("mae_vit.runtime.child._PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(mae_vit.TrainingFailed, match="killed by SIGKILL"):
        mae_vit.pretrain("mae_digits", changes)


def test_a_process_group_of_the_callers_is_refused(changes, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(mae_vit.InputError, match=r"torch\.distributed"):
            mae_vit.pretrain("mae_digits", changes)
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_is_named_by_text_too_and_a_misspelled_one_is_no_empty_run(commanded):
    run = mae_vit.Run(str(commanded))
    assert run == mae_vit.Run(commanded)
    assert run.summary["status"] == "done"
    misspelled = mae_vit.Run(f"{commanded}s")
    for name in ("summary", "metrics", "rows"):
        with pytest.raises(mae_vit.InputError, match=f'{commanded}s; did you mean "{commanded}"'):
            getattr(misspelled, name)
    with pytest.raises(mae_vit.InputError, match=f"config.yaml; give {commanded}$"):
        mae_vit.Run(commanded / "config.yaml").summary  # noqa: B018


def test_a_run_and_numbers_of_numpy_stand_where_paths_and_numbers_do(commanded):
    run = mae_vit.Run(commanded)
    encoder = mae_vit.load_encoder(run)
    assert encoder.info.step == run.summary["steps"]
    with pytest.raises(mae_vit.InputError, match="no classes"):
        mae_vit.load_classifier(run)
    with pytest.raises(mae_vit.InputError, match=r"changes .* list"):
        mae_vit.pretrain("mae_digits", ["train.steps=2"])
    for number in (np.int64(2), torch.tensor(2)):
        assert _overrides({"train.steps": number}) == ["train.steps=2"]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        *((mae_vit.pretrain, argparse.Namespace(seed=0)), (mae_vit.pretrain, io.StringIO("seed: 0"))),
        *((mae_vit.compare, None), (mae_vit.finetune, torch.nn.Linear(1, 1))),
        (mae_vit.load_encoder, {"cls_token": torch.zeros(1)}),
        *((mae_vit.load_classifier, torch.nn.Linear(1, 1)), (mae_vit.Run, None)),
        (partial(mae_vit.prepare, "digits"), 3),
    ],
)
def test_other_types_are_refused_in_a_line_that_names_the_forms(call, value, said):
    with pytest.raises(mae_vit.InputError) as error:
        call(value)
    said(error)


def test_fine_tuning_takes_a_run(commanded, tmp_path):
    few = {"train.steps": 2, "monitor.tensorboard": False, "run.dir": tmp_path / "tuned"}
    run = mae_vit.finetune(mae_vit.Run(commanded), changes=few)
    assert run.summary["status"] == "done"
    assert 0 <= run.summary["test_top1"] <= 1
    assert isinstance(run.encoder(), mae_vit.PretrainedEncoder)
    with pytest.raises(mae_vit.InputError, match="no weights"):
        mae_vit.finetune()


def test_prepare_is_the_command(tmp_path, capsys):
    folder = mae_vit.prepare("digits", tmp_path / "digits", holdout=0.1, shard_samples=600)
    assert "train: " in capsys.readouterr().out
    splits = json.loads((folder / "dataset.json").read_text())["splits"]
    assert set(splits) == {"train", "test", "val"}
    with pytest.raises(mae_vit.InputError, match=r'--holdot.*"--holdout"'):
        mae_vit.prepare("digits", tmp_path / "other", holdot=0.1)
    with pytest.raises(mae_vit.InputError, match="overwrite"):
        mae_vit.prepare("digits", folder)
    assert mae_vit.prepare(["digits"], folder, holdout=0.1, overwrite=True, exclude=None) == folder


@pytest.mark.parametrize(
    ("sources", "kind"),
    [
        (pandas.DataFrame({"path": ["a.png"], "label": ["a"]}), "DataFrame"),
        (datasets.Dataset.from_dict({"image": [1, 2]}), "Dataset"),
        (np.zeros((2, 8, 8, 3), np.uint8), "ndarray"),
        ([PIL.Image.new("RGB", (8, 8))], "Image"),
    ],
)
def test_sources_in_memory_are_refused_in_a_line(tmp_path, sources, kind):
    with pytest.raises(mae_vit.InputError, match=rf"not {kind}\b.*to_csv") as error:
        mae_vit.prepare(sources, tmp_path)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("call", [mae_vit.pretrain, partial(mae_vit.finetune, None), mae_vit.compare])
def test_dotted_keys_are_changes_and_no_config(call):
    with pytest.raises(mae_vit.InputError, match=r'changes=\{"train\.steps"') as error:
        call({"train.steps": 2, "data.path": "x"})
    assert len(error.value.lines) == 1


def test_values_of_options_mean_what_their_text_does_on_the_command_line(tmp_path):
    files = {f"{number}.tif": chunky(values(3, "uint16") + np.uint16(number)) for number in range(3)}
    write_files(tmp_path / "in", files)

    def bands(out, **options):
        folder = mae_vit.prepare(tmp_path / "in", tmp_path / out, workers=1, **options)
        return json.loads((folder / "dataset.json").read_text())["bands"]

    expected = bands("text", bands="3,1", scale="0,4000", nodata="0")
    assert expected["names"] == ["band 3", "band 1"]
    assert expected["nodata"] == 0
    for order in ([3, 1], (3, 1), np.array([3, 1])):
        assert bands(type(order).__name__, bands=order, scale=(0, 4000), nodata=0) == expected
    with pytest.raises(mae_vit.InputError, match=r"bands .* set\b"):
        bands("set", bands={3, 1})
    arguments = parse(["prepare", *_option_words("exclude", ["a", "b"]), "in", "out"])
    assert arguments.exclude == ["a", "b"]
    # No other option may be given several times.
    actions = arguments.parser._actions
    assert [one.dest for one in actions if isinstance(one, argparse._AppendAction)] == [*_REPEATED]


@pytest.mark.slow
def test_a_script_without_a_guard_prepares_on_several_processes(tmp_path):
    """They would run the script again, from its first line."""
    script = tmp_path / "mine.py"
    script.write_text('print("begun")\nimport mae_vit\nmae_vit.prepare("digits", "data/digits", workers=2)\n')
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run(str(script), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begun") == 1
    assert (tmp_path / "data" / "digits" / "dataset.json").is_file()


@pytest.mark.slow
def test_a_comparison_has_rows(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "run": {"name": "own"},
        "data": {"path": digits},
        "reference": "scratch",
        "seeds": [0, 1],
        "set": {"model.in_chans": 1, "model.img_size": 8, "train.steps": 3, "train.effective_batch_size": 32},
        "entries": [{"name": "scratch", "config": "simple_cnn_cifar.yaml"}],
    }
    run = mae_vit.compare(config, {"parallel": 1})
    assert [(row["entry"], row["seed"]) for row in run.rows] == [("scratch", 0), ("scratch", 1)]
    assert all(0 <= row["test_top1"] <= 1 for row in run.rows)
    assert (run.path / "report.html").is_file()
    broken = {**config, "set": {**config["set"], "model.img_size": 4}, "run": {"name": "broken"}}
    with pytest.raises((mae_vit.TrainingFailed, mae_vit.InputError)):
        mae_vit.compare(broken)
