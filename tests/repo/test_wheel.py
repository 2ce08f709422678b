"""The wheel alone trains: tried in an environment and a folder without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers.commands import ROOT, SMALL_MAE

from mae_vit.runtime.ranks import free_port

pytestmark = pytest.mark.slow
SHORT = [*SMALL_MAE, "train.steps=4", "monitor.tensorboard=false", "monitor.evaluate_images=32"]


def call(*words, cwd, **more) -> str:
    """Runs a command as a new user has it: of this shell's environment nothing that names the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env={**environment, **more}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel from files that git does not ignore: earlier builds have no part in it."""
    folder = tmp_path_factory.mktemp("source")
    parts = ["mae_vit", "configs", "pyproject.toml", "README.md", "LICENSE"]
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *parts]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # else deleted, and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    call(*pip, "-w", out, folder, cwd=folder)
    (built,) = out.glob("mae_vit-*.whl")
    return built


@pytest.fixture(scope="module")
def box(wheel, tmp_path_factory):
    """An empty folder, and an environment of the wheel; the packages that it depends on are this environment's."""
    home = tmp_path_factory.mktemp("box")
    environment = home / "environment"
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=home)
    (packages,) = environment.glob("lib/python*/site-packages")
    # The folder alone: its .pth files, one of which leads to the checkout, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = environment / "bin" / "python"
    call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home
    )
    work = home / "work"
    work.mkdir()
    imported_file = call(python, "-c", "import mae_vit; print(mae_vit.__file__)", cwd=work)
    assert Path(imported_file.strip()).is_relative_to(environment)

    def run(*words, **more):
        return call(environment / "bin" / words[0], *words[1:], cwd=work, **more)

    run.work = work
    run("mae-vit", "prepare", "digits", "data/digits")
    run("mae-vit", "pretrain", "mae_digits", *SHORT)
    return run


def test_pretraining_took_the_preset_and_left_an_encoder(box):
    run = box.work / "runs" / "mae_digits"
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert (run / "encoder.safetensors").is_file()


def test_fine_tuning_finds_its_recipe(box):
    box("mae-vit", "finetune", "--ckpt", "runs/mae_digits", "train.steps=4", "run.name=tuned")
    summary = json.loads((box.work / "runs" / "tuned" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["test_size"] > 0


def test_a_comparison_finds_its_configs_and_runs_its_cells(box):
    output = box("mae-vit", "compare", "compare_demo", "--dry-run")
    assert "all checks passed" in output
    own = box.work / "own.yaml"
    own.write_text(
        "run: {name: own}\ndata: {path: data/digits}\nreference: scratch\nseeds: [0]\nparallel: 1\n"
        "set: {model.in_chans: 1, model.img_size: 8, train.steps: 3, train.effective_batch_size: 32}\n"
        "entries:\n  - {name: scratch, config: simple_cnn_cifar.yaml}\n"
    )
    assert "1 of 1 result done" in box("mae-vit", "compare", "own.yaml")


def test_the_other_commands(box):
    assert "mae_base " in box("mae-vit", "presets")
    assert "ok " in box("mae-vit", "doctor", "mae_digits", "run.name=checked")
    box("mae-vit", "replay", "runs/mae_digits", "--step", "2")
    assert (box.work / "runs" / "mae_digits" / "replay").is_dir()
    assert "verdict   Finished" in box("mae-vit", "report", "runs/mae_digits")


@pytest.mark.distributed
def test_two_ranks_under_deepspeed_and_torchrun(box):
    port = str(free_port())
    ranks = ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port, "--module"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for name, launcher in (("deepspeed", ranks), ("torchrun", torchrun)):
        box("python", "-m", *launcher, "mae_vit.cli", "pretrain", "mae_digits", *SHORT, "train.engine=deepspeed",
            "data.workers=1", "data.source=tar", f"run.name={name}")  # fmt: skip
        folder = box.work / "runs" / name
        assert json.loads((folder / "summary.json").read_text())["status"] == "done"
        assert json.loads((folder / "environment.json").read_text())["world_size"] == 2
