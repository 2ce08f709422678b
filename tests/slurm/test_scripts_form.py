"""The Slurm scripts' form: what no cluster is needed for."""

import os
import re
import subprocess

import pytest
from helpers.commands import ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sh"))
JOBS = [script for script in SCRIPTS if "#SBATCH" in script.read_text()]


def by_name(scripts):
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.name)


def test_there_are_four_jobs():
    assert [script.name for script in JOBS] == ["compare.sh", "doctor.sh", "finetune.sh", "pretrain.sh"]


@by_name(SCRIPTS)
def test_no_personal_paths(script):
    paths = re.findall(r"(?<![\w.}/])(?:~\w*)?/[\w.]+(?:/[\w.-]+)*", script.read_text())
    assert set(paths) <= {"/usr/bin/env", "/dev/null"}


def options_of(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))


@by_name(JOBS)
def test_no_site(script):
    options = options_of(script)
    assert not {"partition", "account", "mail-user", "constraint", "nodelist", "chdir"} & set(options)


@by_name([script for script in JOBS if script.name != "doctor.sh"])
def test_all_that_surviving_takes(script):
    options = options_of(script)
    assert {"requeue", "open-mode", "signal", "output"} <= set(options)
    assert options["open-mode"] == "append"
    assert options["signal"].startswith("B:USR1@")


def test_site_settings_are_neutral():
    lines = [line.strip() for line in (ROOT / "slurm" / "site.sh").read_text().splitlines()]
    code = [line for line in lines if line and not line.startswith("#")]
    assert code == ["if [[ -e .venv/bin/activate ]]; then", "source .venv/bin/activate", "fi"]


def test_every_example_asks_for_cores():
    """Without --cpus-per-task each rank has one, and decodes by one worker."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.yaml"), *SCRIPTS]
    examples = []
    for page in pages:
        text = re.sub(r"\\\n#?\s*", "", page.read_text())
        # "sbatch ..." stands for the options of a line before it.
        examples += re.findall(r"^.*\bsbatch (?!\.\.\.).*\bslurm/\w+\.sh.*$", text, re.MULTILINE)
    assert len(examples) >= 11
    assert [line for line in examples if "--cpus-per-task=" not in line] == []


@by_name(JOBS)
def test_outside_of_slurm_it_is_one_clear_line(script):
    words = [f"slurm/{script.name}", "configs/mae_digits.yaml"]
    ended = subprocess.run(["bash", *words], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2
    assert ended.stderr == f"error: not inside a Slurm job: start it by sbatch {' '.join(words)}\n"
    assert ended.stdout == ""


@by_name(JOBS)
def test_outside_of_the_repository_it_is_one_clear_line(script, tmp_path):
    ended = subprocess.run(["bash", script], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: no slurm/common.sh in {tmp_path}: call sbatch in the repository's root, or with --chdir\n"
    )


def test_site_settings_that_are_not_there_are_one_clear_line(tmp_path):
    environment = os.environ | {"SLURM_JOB_ID": "7", "MAE_VIT_SITE": str(tmp_path / "site.sh")}
    words = ["bash", "slurm/pretrain.sh", "configs/mae_digits.yaml"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ended.returncode == 2
    assert ended.stderr == f"error: no site settings {tmp_path / 'site.sh'} in {ROOT}\n"
