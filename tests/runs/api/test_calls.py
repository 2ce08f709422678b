"""The commands as functions: the same bits, the caller's state left alone, errors raised."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, SMALL_PRETRAIN, lines_of
from safetensors.torch import load_file

import mae_vit
from mae_vit.cli.api import _overrides
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


def state_of_the_process():
    """What a call must leave as it is."""
    return {
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)],
        "environment": dict(os.environ),
        "words": list(sys.argv),
        "streams": (sys.stdout, sys.stderr),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cudnn.allow_tf32,
        "generators": (
            torch.get_rng_state().tolist(),
            random.getstate(),
            [np.asarray(part).tolist() for part in np.random.get_state()],
        ),
        "group": torch.distributed.is_initialized(),
        "main": (sys.modules["__main__"].__dict__.get("__file__"), sys.modules["__main__"].__spec__),
    }  # fmt: skip


@pytest.fixture
def unusual_process(capsys):
    """A caller with settings of its own, each of which would change what a run computes."""
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(5)
    with torch.no_grad():
        yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


def test_a_call_trains_the_bits_of_the_command_and_leaves_the_process_alone(
    changes, commanded, unusual_process
):
    before = state_of_the_process()
    run = mae_vit.pretrain("mae_digits", changes)
    assert state_of_the_process() == before
    assert encoder_bytes(run.path) == encoder_bytes(commanded)
    assert (run.summary["status"], run.summary["steps"]) == ("done", 6)
    assert run.metrics == lines_of(run.path)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run.rows == []
    encoder = run.encoder()
    assert isinstance(encoder, mae_vit.PretrainedEncoder)
    # A finished run says so, and is returned.
    assert mae_vit.pretrain("mae_digits", changes).path == run.path


def test_deepspeed_runs_twice_in_a_process(changes, tmp_path):
    run = mae_vit.pretrain("mae_digits", {**changes, "train.engine": "deepspeed"})
    assert not torch.distributed.is_initialized()
    again = {**changes, "train.engine": "deepspeed", "train.zero_stage": 1, "run.dir": tmp_path / "again"}
    tensors = load_file(mae_vit.pretrain("mae_digits", again).path / "encoder.safetensors")
    for name, value in load_file(run.path / "encoder.safetensors").items():
        torch.testing.assert_close(tensors[name], value)


def test_a_mapping_is_a_config(changes, commanded):
    from mae_vit.config.typed_yaml import parse_yaml

    values = parse_yaml((commanded / "config.yaml").read_text(), "it")
    values["run"]["dir"] = changes["run.dir"]
    assert encoder_bytes(mae_vit.pretrain(values).path) == encoder_bytes(commanded)
    del values["run"]["name"]
    with pytest.raises(mae_vit.InputError, match=r'^config: "run\.name" is missing$'):
        mae_vit.pretrain(values)


@pytest.mark.parametrize(
    ("config", "changed", "expected"),
    [
        ("mae_digit", {}, 'cannot read config mae_digit: no such file or directory; did you mean "'),
        ("mae_digits", {"train.step": 3}, 'changes: unknown key "train.step": did you mean "train.steps"?'),
        ("mae_digits", {"train.steps": object()}, "train.steps: a value of type object is none of text"),
        ("mae_digits", {"data.path": "nowhere"}, "data folder nowhere does not exist"),
        ("mae_digits", {"train.steps": 2, "train.epochs": 1}, "drop epochs=1.0, or steps=2"),
        ({"run": 3}, {}, "config: "),
    ],
)
def test_bad_input_is_raised_and_leaves_nothing(changes, capsys, config, changed, expected):
    before = state_of_the_process()
    with pytest.raises(mae_vit.InputError) as caught:
        mae_vit.pretrain(config, {**changes, "train.steps": None, **changed} if changed else changes)
    assert expected in str(caught.value)
    assert capsys.readouterr().err == ""
    assert not changes["run.dir"].exists()
    assert state_of_the_process() == before


def signal_at_step(folder, step, number):
    """Sends this process a signal once a step is logged."""

    def wait():
        deadline = time.monotonic() + 500
        while time.monotonic() < deadline:
            if (folder / "metrics.jsonl").exists() and any(
                line["step"] >= step for line in whole_lines(folder)
            ):
                os.kill(os.getpid(), number)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def whole_lines(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize(
    ("number", "raised"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        pytest.param(signal.SIGTERM, mae_vit.RunInterrupted, marks=pytest.mark.slow),
    ],
)
def test_a_stop_saves_then_raises_and_the_same_call_resumes(changes, tmp_path, number, raised):
    # Under tests SIGINT may be ignored, as in a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    long = {
        **changes,
        "train.steps": 100,
        "checkpoint.every_steps": 1000,
        "monitor.evaluate_every_steps": 1000,
    }
    before = state_of_the_process()
    thread = signal_at_step(changes["run.dir"], 3, number)
    with pytest.raises(raised):
        mae_vit.pretrain("mae_digits", long)
    thread.join()
    assert state_of_the_process() == before
    summary = json.loads((changes["run.dir"] / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 3 <= summary["steps"] < 100
    resumed = mae_vit.pretrain("mae_digits", long)
    straight = mae_vit.pretrain("mae_digits", {**long, "run.dir": tmp_path / "straight"})
    assert encoder_bytes(resumed.path) == encoder_bytes(straight.path)


def test_a_process_group_of_the_callers_is_refused(changes, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(mae_vit.InputError, match=r"has a torch\.distributed process group"):
            mae_vit.pretrain("mae_digits", changes)
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_is_named_by_text_too_and_a_misspelled_one_is_no_empty_run(commanded):
    run = mae_vit.Run(str(commanded))
    assert run == mae_vit.Run(commanded)
    assert run.summary["status"] == "done"
    misspelled = mae_vit.Run(f"{commanded}s")
    for name in ("summary", "metrics", "rows"):
        with pytest.raises(mae_vit.InputError, match=f"no run folder {commanded}s: did you mean"):
            getattr(misspelled, name)
    with pytest.raises(mae_vit.InputError, match=f"config.yaml: give {commanded}$"):
        mae_vit.Run(commanded / "config.yaml").summary  # noqa: B018


def test_a_run_and_numbers_of_numpy_stand_where_paths_and_numbers_do(commanded, changes):
    run = mae_vit.Run(commanded)
    assert mae_vit.load_encoder(run).info.step == run.summary["steps"]
    with pytest.raises(mae_vit.InputError, match="a run of pretraining has no classes"):
        mae_vit.load_classifier(run)
    with pytest.raises(
        mae_vit.InputError, match="ckpt: give a run, its folder, a file or a name, not Pretrained"
    ):
        mae_vit.finetune(mae_vit.load_encoder(run))
    with pytest.raises(mae_vit.InputError, match=r"changes: give a mapping, as .*, not list"):
        mae_vit.pretrain("mae_digits", ["train.steps=2"])
    for number in (np.int64(2), torch.tensor(2)):
        assert _overrides({"train.steps": number}) == ["train.steps=2"]


def test_fine_tuning_takes_a_run_and_few_shots_too(commanded, tmp_path):
    before = state_of_the_process()
    pretrained = mae_vit.Run(commanded)
    few = {"train.steps": 2, "monitor.tensorboard": False, "run.dir": tmp_path / "tuned"}
    run = mae_vit.finetune(pretrained, changes=few)
    assert run.summary["status"] == "done"
    assert 0 <= run.summary["test_top1"] <= 1
    scored = mae_vit.finetune(commanded, changes={"finetune.mode": "knn", "run.dir": tmp_path / "scored"})
    assert scored.summary["status"] == "done"
    assert scored.metrics == []
    assert state_of_the_process() == before
    assert isinstance(run.encoder(), mae_vit.PretrainedEncoder)
    with pytest.raises(mae_vit.InputError, match="nothing to do"):
        mae_vit.finetune()


@pytest.mark.parametrize(
    ("call", "options", "expected"),
    [
        (mae_vit.pretrain, {"chnges": {}}, 'pretrain has no keyword "chnges": did you mean "changes"?'),
        (mae_vit.finetune, {"checkpoint": "x"}, 'finetune has no keyword "checkpoint": did you mean "ckpt"?'),
        (
            mae_vit.compare,
            {"data": "x"},
            'go in changes={"data.path": "photos/", "train.epochs": 10}; known: config',
        ),
    ],
)
def test_an_unknown_keyword_is_one_line(call, options, expected):
    with pytest.raises(mae_vit.InputError, match=re.escape(expected)):
        call("mae_digits", **options)


def test_prepare_is_the_command(tmp_path, capsys):
    folder = mae_vit.prepare("digits", tmp_path / "digits", holdout=0.1, shard_samples=600)
    assert "train: " in capsys.readouterr().out
    splits = json.loads((folder / "dataset.json").read_text())["splits"]
    assert set(splits) == {"train", "test", "val"}
    with pytest.raises(mae_vit.InputError, match=r'--holdot.*did you mean "--holdout"'):
        mae_vit.prepare("digits", tmp_path / "other", holdot=0.1)
    with pytest.raises(mae_vit.InputError, match="overwrite"):
        mae_vit.prepare("digits", folder)
    assert mae_vit.prepare(["digits"], folder, overwrite=True, exclude=None) == folder


@pytest.mark.slow
def test_a_script_without_a_guard_prepares_on_several_processes(tmp_path):
    """They would run the script again, from its first line."""
    script = tmp_path / "mine.py"
    script.write_text('print("begun")\nimport mae_vit\nmae_vit.prepare("digits", "data/digits", workers=2)\n')
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begun") == 1
    assert (tmp_path / "data" / "digits" / "dataset.json").is_file()


SCRIPT = """
import mae_vit

run = mae_vit.pretrain("mae_digits", {changes})
print("steps", run.summary["steps"])
"""


@pytest.mark.slow
def test_a_script_without_a_guard_has_data_workers(changes, commanded, tmp_path):
    """Workers are processes that would run the script again."""
    words = {key: str(value) if "/" in str(value) else value for key, value in changes.items()}
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(changes={**words, "data.workers": 2, "data.source": "tar"}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "steps 6"
    assert encoder_bytes(changes["run.dir"]) == encoder_bytes(commanded)


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
    before = state_of_the_process()
    run = mae_vit.compare(config, {"parallel": 1})
    assert state_of_the_process() == before
    assert [(row["entry"], row["seed"]) for row in run.rows] == [("scratch", 0), ("scratch", 1)]
    assert all(0 <= row["test_top1"] <= 1 for row in run.rows)
    assert (run.path / "report.html").is_file()
    broken = {**config, "set": {**config["set"], "model.img_size": 4}, "run": {"name": "broken"}}
    with pytest.raises((mae_vit.TrainingFailed, mae_vit.InputError)):
        mae_vit.compare(broken)
