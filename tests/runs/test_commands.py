"""The command line itself: help, exit codes, one line for bad input, what is said at the end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers.commands import ROOT, SMALL_PRETRAIN, one_line, wait_until
from helpers.images import encoded, write_files
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.core import __version__


@pytest.mark.parametrize(
    "words",
    [
        *("", "prepar", "prepare", "prepare digits", "prepare digits {out} --shard-samples 0"),
        *("prepare digits {out} --split ../x", "prepare digits {out} --overwite"),
        *("prepare --shard-mb 3 digits {out}", "prepare digits {out} --faster"),
        # argparse itself names what is missing, and not what was misspelled.
        "embed x y --outt {out}",
        *("export runs/none --to hf", "--versoin"),
        # Another command's option is no suggestion.
        *("check --decde {out}", "check --shard-mib=3 {out}", "check {out}", "check https://host/data"),
        *("presets cifar --show mae_digits", "compare compare_demo --report --dry-run"),
        *("replay runs/none --step 1 --out {out}", "verify-resume --keep /proc/none"),
        "pretrain mae_digits run.plugins=[sys] --dry-run",
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, capsys, words, said):
    out = tmp_path / "out"
    assert main(words.format(out=out).split()) == 2
    said(one_line(capsys))
    assert not out.exists()


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"mae-vit {__version__}\n"


def test_options_may_stand_anywhere_and_the_end_says_what_was_done(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["prepare", "--shard-samples", "600", "digits", "--overwrite", str(out)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"train: 1,\d\d\d .* 3 shards", text)
    assert re.search(r"test: \d\d\d .* 1 shard\n", text)
    assert re.search(rf"{out}: 10 classes \(0, 1, 2, \.\.\.\), \d+\.\d s", text)


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys, said):
    (tmp_path / "out").write_text("mine")
    assert main(["prepare", "digits", str(tmp_path / "out")]) == 2
    said(capsys.readouterr().err.splitlines()[-1])
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("words", [["-m", "mae_vit.cli.main", "doctor"], ["pretrain/run.py", "--dry-run"]])
def test_a_reader_who_leaves_ends_in_no_traceback(digits, tmp_path, words):
    run = [f"data.path={digits}", f"run.dir={tmp_path}", "--config", "configs/pretrain/mae_digits.yaml"]
    process = subprocess.Popen(
        [sys.executable, *words, *run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(100), errors) == (0, "")


# While processes start, and when they are at work.
@pytest.mark.parametrize(("workers", "after_s"), [("0", 0.5), ("2", 0.3)])
def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path, workers, after_s):
    # Seconds of work: the command is in mid-split when it is stopped.
    image, out = encoded(Image.effect_noise((600, 600), 50), "png"), tmp_path / "out"
    source = write_files(tmp_path / "src", {f"cat/{number}.png": image for number in range(600)})
    words = ["-m", "mae_vit.cli.main", "prepare", str(source), str(out), "--workers", workers]
    process = subprocess.Popen(
        [sys.executable, *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C reaches every process of a terminal's foreground group.
        start_new_session=True,
        # Around the tests it may be ignored: they may be a background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until((out / ".train.partial").exists)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in errors
    assert not out.exists()


@pytest.mark.parametrize("before", [["--local_rank=0"], ["--local-rank", "0"]], ids=["deepspeed", "torch"])
def test_a_job_runs_a_preset_behind_what_launchers_add(digits, tmp_path, before):
    words = ["pretrain", "mae_digits", f"data.path={digits}", f"run.dir={tmp_path / 'run'}"]
    assert main([*before, *words, *SMALL_PRETRAIN, "train.steps=1"]) == 0
    assert (tmp_path / "run" / "encoder.safetensors").is_file()
