"""Comparisons that were stopped, killed, or find another run in their place."""

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
from helpers.commands import ROOT, run, wait_until
from helpers.comparison import compare_command, read_rows, write_config

from mae_vit.comparison.command import main
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.pretraining.command import main as pretrain
from mae_vit.training.outputs.run_folder import RunFolder


def start(config: Path, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *compare_command(config, folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(folder: Path, pattern: str, process: subprocess.Popen) -> None:
    wait_until(lambda: any(folder.glob(pattern)) or process.poll() is not None)


@pytest.mark.slow
@pytest.mark.distributed
def test_stopped_it_saves_and_leaves_nothing_running(digits, tmp_path):
    config = write_config(tmp_path, digits, steps=400)
    folder = tmp_path / "run"
    process = start(config, folder)
    try:
        wait_for(folder, "pretrain-mae/*/checkpoints/step-*", process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 75, process.stderr.read()
        assert psutil.wait_procs(children, timeout=500)[1] == []
    finally:
        process.kill()
    (summary,) = folder.glob("pretrain-mae/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_killed_three_times_it_ends_with_the_same_table(digits, tmp_path):
    config = write_config(tmp_path, digits, steps=40)
    assert run(*compare_command(config, tmp_path / "straight"), timeout=900).returncode == 0
    folder, chance = tmp_path / "killed", random.Random(0)
    for pattern in (
        "pretrain-mae/*/checkpoints/step-*",
        "vit-*/*/metrics.jsonl",
        "simplecnn/*/metrics.jsonl",
    ):
        process = start(config, folder)
        try:
            wait_for(folder, pattern, process)
            time.sleep(3 * chance.random())
            family = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            # Nothing goes on that a second comparison could meet.
            assert psutil.wait_procs(family, timeout=500)[1] == []
        finally:
            process.kill()
    assert run(*compare_command(config, folder), timeout=900).returncode == 0
    assert read_rows(folder) == read_rows(tmp_path / "straight")
    assert_equal_compute_is_equal(read_rows(folder))


def assert_equal_compute_is_equal(table: list[dict[str, str]]) -> None:
    lines = {(line["entry"], line["mode"]): line for line in table}
    theirs, ours = lines["ViT from MAE", "finetune"], lines["as long as MAE", "finetune"]
    total = float(theirs["finetune_flops"]) + float(theirs["pretrain_flops"])
    assert total == pytest.approx(float(ours["finetune_flops"]), rel=0.02)  # whole steps
    assert float(ours["pretrain_flops"]) == 0


def test_a_folder_of_another_pretraining_run_is_named_before_anything_begins(digits, tmp_path, capsys, said):
    """Its folder has a whole encoder, of fewer steps than the comparison asks for."""
    config = write_config(tmp_path, digits, steps=2)
    content = parse_yaml(config.read_text(), "")
    mae = content["pretrain"]["MAE"] | {"dir": str(tmp_path / "mae")}
    settings = [f"{key}={json.dumps(value)}" for key, value in mae["set"].items()]
    assert (
        pretrain(["--config", mae["config"], *settings, f"data.path={digits}", f"run.dir={mae['dir']}"]) == 0
    )
    config.write_text(json.dumps({**content, "pretrain": {"MAE": mae}}))
    command = compare_command(config, tmp_path / "run")[1:]
    capsys.readouterr()
    for length in ("steps", "epochs"):
        assert main([*command, f"pretrain.MAE.set.train.{length}=3"]) == 2
        said(capsys.readouterr().err)
    other = shutil.copytree(digits, tmp_path / "other data")
    described = json.loads((other / "dataset.json").read_text())
    described["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (other / "dataset.json").write_text(json.dumps(described))
    assert main([*command, "pretrain.MAE.set.train.steps=3", f"data.path={other}"]) == 2
    said(capsys.readouterr().err.replace(str(digits), "DIGITS"))
    assert not (tmp_path / "run").exists()
    # So is a run that trains there, before its first save.
    (tmp_path / "mae").rename(tmp_path / "kept")
    (tmp_path / "mae").mkdir()
    with RunFolder(tmp_path / "mae") as used:
        used.lock()
        assert main(command) == 2
        assert main([*command, "--dry-run"]) == 0
    said(re.sub("process .* since [-0-9]+ [0-9:]+", "PROCESS", capsys.readouterr().err))
    shutil.rmtree(tmp_path / "mae")
    (tmp_path / "kept").rename(tmp_path / "mae")
    # Its own run; the plan tells how long each row takes, and all of them.
    assert main([*command, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    timed = [line for line in lines if re.search(r"\d runs?, \d done", line)]
    assert len(timed) == 10
    # That run is done.
    assert [re.search(r"(\d) done", line)[1] for line in timed] == ["1"] * 2 + ["0"] * 8
    assert [line for line in timed[2:] if not re.search(r"0 done, (about )?\d+:\d\d:\d\d", line)] == []
    assert any(re.match(r"time +(about )?\d+:\d\d:\d\d", line) for line in lines)
