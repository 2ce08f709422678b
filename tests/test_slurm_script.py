"""The Slurm script: its form, and on a cluster a run that is told to stop and ends by itself."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sh"))
# Taken before a fixture removes SLURM_*.
SLURM_CONF = os.environ.get("SLURM_CONF")
ON_CLUSTER = os.environ.get("SLURM_TEST_CLUSTER") == "1" and shutil.which("sbatch") is not None


def test_there_is_a_script():
    assert [script.name for script in SCRIPTS] == ["pretrain.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_no_personal_paths_and_no_site(script):
    text = script.read_text()
    paths = re.findall(r"(?<![\w.}/])(?:~\w*)?/[\w.]+(?:/[\w.-]+)*", text)
    assert set(paths) <= {"/usr/bin/env", "/dev/null"}
    options = re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE)
    assert not {"partition", "account", "mail-user", "constraint", "nodelist", "chdir"} & set(options)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_outside_of_slurm_it_is_one_clear_line(script):
    found = subprocess.run(["bash", str(script), "configs/mae_digits.yaml"], capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr == (
        "error: not inside a Slurm job: start it by sbatch slurm/pretrain.sh CONFIG [key=value ...]\n"
    )
    assert found.stdout == ""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    """Waits until `condition()`; fails naming `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.5)


@pytest.mark.slurm
@pytest.mark.skipif(not ON_CLUSTER, reason="needs SLURM_TEST_CLUSTER=1 and a Slurm cluster's sbatch on PATH")
def test_a_signalled_job_saves_requeues_and_ends_as_if_undisturbed(digits, tmp_path, monkeypatch):
    if SLURM_CONF:
        monkeypatch.setenv("SLURM_CONF", SLURM_CONF)

    def submit(name: str) -> str:
        command = [
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--ntasks-per-node=1",
            f"--output={tmp_path / name}.out",
            "slurm/pretrain.sh",
            "configs/mae_digits.yaml",
            f"data.path={digits}",
            f"run.dir={tmp_path / name}",
            "data.workers=1",
            "model.embed_dim=32",
            "model.depth=1",
            "train.epochs=15",
            "monitor.log_every_steps=5",
            "monitor.tensorboard=false",
            "checkpoint.every_steps=50",
        ]
        environment = os.environ | {"MAE_VIT_ENV": str(Path(sys.executable).parent / "activate")}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def output(name: str) -> str:
        path = tmp_path / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def shown(job: str, field: str) -> str:
        text = subprocess.run(
            ["scontrol", "show", "job", job], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        found = re.search(rf"\b{field}=(\S+)", text)
        assert found, text
        return found[1]

    jobs = []
    try:
        jobs.append(submit("signalled"))
        # A line of metrics at step 30 of 165: before the first checkpoint.
        wait_for(lambda: "\nstep 30/" in output("signalled"), "step 30")
        subprocess.run(["scancel", "--batch", "--signal=USR1", jobs[0]], check=True, timeout=60)
        wait_for(lambda: "): requeueing" in output("signalled"), "the requeue")
        wait_for(lambda: shown(jobs[0], "JobState") in ("COMPLETED", "FAILED"), "the second sitting")
        assert shown(jobs[0], "JobState") == "COMPLETED", output("signalled")
        assert shown(jobs[0], "Restarts") == "1"
        assert "going on from" in output("signalled")

        jobs.append(submit("undisturbed"))
        wait_for(lambda: shown(jobs[1], "JobState") in ("COMPLETED", "FAILED"), "the undisturbed run")
        assert shown(jobs[1], "Restarts") == "0"
    finally:
        for job in jobs:
            subprocess.run(["scancel", job], timeout=60)
    encoders = [
        (tmp_path / name / "encoder.safetensors").read_bytes() for name in ("signalled", "undisturbed")
    ]
    assert encoders[0] == encoders[1]
