"""The Slurm scripts' form: what no cluster is needed for."""

import os
import re
import subprocess
from pathlib import Path

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
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*/*.yaml"), *SCRIPTS]
    examples = []
    for page in pages:
        text = re.sub(r"\\\n#?\s*", "", page.read_text())
        # "sbatch ..." stands for the options of a line before it.
        examples += re.findall(r"^.*\bsbatch (?!\.\.\.).*\bslurm/\w+\.sh.*$", text, re.MULTILINE)
    assert len(examples) >= 11
    assert [line for line in examples if "--cpus-per-task=" not in line] == []


def refused(*words: str, cwd: Path = ROOT, **environment: str) -> str:
    """What a script says that starts nothing."""
    environment = os.environ | environment
    ended = subprocess.run(["bash", *words], capture_output=True, text=True, cwd=cwd, env=environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    return ended.stderr


@by_name(JOBS)
def test_outside_of_slurm_it_is_one_clear_line(script):
    words = [f"slurm/{script.name}", "configs/pretrain/mae_digits.yaml"]
    start = f"start it with sbatch --gpus-per-node=1 --cpus-per-task=12 {' '.join(words)}"
    assert refused(*words) == f"error: not inside a Slurm job; {start}\n"


@by_name(JOBS)
def test_outside_of_the_repository_it_is_one_clear_line(script, tmp_path):
    assert refused(str(script), cwd=tmp_path) == (
        f"error: no slurm/common.sh in {tmp_path}; run sbatch in the repository's root, or with --chdir\n"
    )


def test_site_settings_that_are_not_there_are_one_clear_line(tmp_path):
    site = str(tmp_path / "site.sh")
    said = refused(
        "slurm/pretrain.sh", "configs/pretrain/mae_digits.yaml", SLURM_JOB_ID="7", MAE_VIT_SITE=site
    )
    assert said == f"error: no site settings {site} in {ROOT}; set MAE_VIT_SITE=FILE\n"


EXAMPLES = {
    "compare.sh": "slurm/compare.sh configs/compare/compare_cifar10_5k.yaml",
    "doctor.sh": "slurm/doctor.sh configs/pretrain/mae_base.yaml",
    "finetune.sh": "slurm/finetune.sh --ckpt runs/mae_base",
    "pretrain.sh": "slurm/pretrain.sh configs/pretrain/mae_base.yaml",
}


@by_name(JOBS)
@pytest.mark.parametrize("words", [(), ("train.epochs=3",)], ids=["nothing", "a key alone"])
def test_without_a_config_it_is_one_clear_line_before_anything_starts(script, words, tmp_path):
    site, srun = tmp_path / "site.sh", tmp_path / "srun"
    site.write_text(f"notes={tmp_path / 'notes'}\n")
    srun.write_text(f"#!/bin/bash\ntouch {tmp_path / 'started'}\n")
    srun.chmod(0o755)
    environment = {"SLURM_JOB_ID": "7", "MAE_VIT_SITE": str(site), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (line,) = refused(f"slurm/{script.name}", *words, **environment).splitlines()
    first = "neither a config nor --ckpt is given" if script.name == "finetune.sh" else "must be a config"
    assert line.startswith("error: ")
    assert first in line
    assert f"sbatch --gpus-per-node=1 --cpus-per-task=12 {EXAMPLES[script.name]}" in line
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "notes").exists()
    # What the example names comes with the repository.
    config = EXAMPLES[script.name].split()[-1]
    assert config.startswith("runs/") or (ROOT / config).is_file()


@pytest.mark.parametrize("option", ["--config", "--dry-run"])
def test_an_option_in_place_of_the_config_is_named(option, tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("")
    words = ["slurm/pretrain.sh", option, "configs/pretrain/mae_digits.yaml"]
    said = refused(*words, SLURM_JOB_ID="7", MAE_VIT_SITE=str(site))
    assert said.endswith(f'slurm/pretrain.sh configs/pretrain/mae_base.yaml; it is "{option}"\n')


def run_among(stand_ins: dict[str, str], tmp_path: Path, *words: str, **environment: str):
    """Runs a script with stand-ins for Slurm's commands."""
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "site.sh").write_text(f"notes={tmp_path}/notes\n")
    environment = os.environ | {
        "SLURM_JOB_ID": "7",
        "MAE_VIT_SITE": str(tmp_path / "site.sh"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **environment,
    }
    return subprocess.run(["bash", *words], capture_output=True, text=True, cwd=ROOT, env=environment)


@by_name([script for script in JOBS if script.name != "doctor.sh"])
def test_a_task_of_an_array_is_a_run_of_its_own_but_in_a_comparison(script, tmp_path):
    """The stand-ins print what the ranks are told."""
    stand_ins = dict.fromkeys(("srun", "squeue", "scontrol"), 'echo "$0 ${MAE_VIT_ARRAY_TASK:-none}"')
    words = [str(script), *(["--ckpt"] if script.name == "finetune.sh" else []), "runs/x"]
    ended = run_among(stand_ins, tmp_path, *words, SLURM_ARRAY_TASK_ID="3")
    assert f"{tmp_path}/srun {'none' if script.name == 'compare.sh' else 3}\n" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "words", ["small_resnet_photos_64", "train.epochs=3 --config=x.yaml", "--ckpt runs/x"]
)
def test_fine_tuning_takes_a_preset_a_config_or_weights(words, tmp_path):
    stand_ins = dict.fromkeys(("srun", "squeue", "scontrol"), 'echo "$@"')
    ended = run_among(stand_ins, tmp_path, "slurm/finetune.sh", *words.split())
    assert f"finetune/run.py {words}\n" in ended.stdout, ended.stderr


@pytest.mark.parametrize("failures", [2, 3])
def test_a_controller_that_does_not_answer_is_asked_three_times(failures, tmp_path):
    stand_ins = {
        "srun": "exit 75",
        "squeue": f'echo >>$0.asked; [ $(wc -l <$0.asked) -gt {failures} ] && echo "RUNNING None"',
        "scontrol": 'echo "$@"',
        "sleep": "",
    }
    ended = run_among(stand_ins, tmp_path, "slurm/pretrain.sh", "runs/x")
    assert ended.returncode == 75
    requeued = failures < 3
    assert ended.stdout.endswith("\nrequeue 7\n") == requeued
    unanswered = "error: squeue does not answer, so job 7 is not requeued; the same sbatch resumes it\n"
    assert ended.stderr == ("" if requeued else unanswered)
