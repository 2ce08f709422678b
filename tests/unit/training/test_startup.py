"""Before a run begins: its device, and its place in a Slurm array."""

from pathlib import Path

import pytest

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.startup import as_array_task, check_resumable, choose_device, note_of_run_around


def config_of(name, *overrides):
    return load_config(PretrainConfig, find_config(name), overrides)


def test_a_slurm_job_without_a_gpu_trains_no_large_model_unless_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    large = config_of("mae_base")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert choose_device(large, Ranks()).type == "cpu"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(InputError, match=r"model.name=B\b.*--gpus-per-node=1.* run\.device=cpu"):
        choose_device(large, Ranks())
    for meant in (config_of("mae_base", "run.device=cpu"), config_of("mae_digits")):
        assert choose_device(meant, Ranks()).type == "cpu"
    # A GPU is left alone where the CPU is asked for.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_device(config_of("mae_digits", "run.device=cpu"), Ranks()).type == "cpu"


def test_each_task_of_an_array_is_a_run_of_its_own(monkeypatch):
    config = config_of("mae_digits", "run.seed=5", "run.name=try")
    monkeypatch.delenv("MAE_VIT_ARRAY_TASK", raising=False)
    assert as_array_task(config) is config
    monkeypatch.setenv("MAE_VIT_ARRAY_TASK", "2")
    run = as_array_task(config).run
    assert (run.seed, run.name, run.dir) == (7, "try-2", None)
    run = as_array_task(config_of("mae_digits", "run.dir=/runs/x")).run
    assert (run.seed, run.dir) == (2, "/runs/x-2")


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [([], True), (["run.dir=moved"], False), (["run.name=other"], False), (["train.steps=3"], True)],
)
def test_a_config_in_the_folder_of_a_run_that_was_moved_is_said(tmp_path, monkeypatch, overrides, noted):
    monkeypatch.chdir(tmp_path)
    path = Path("moved", "config.yaml")
    (path.parent / "checkpoints" / "step-00000002").mkdir(parents=True)
    config, arguments = config_of("mae_digits", *overrides), Arguments(path, overrides)
    assert ["run.dir=moved" in note for note in note_of_run_around(arguments, config)] == [True] * noted
    Path("runs").mkdir()
    path.parent.rename(Path("runs", config.run.name))
    assert not note_of_run_around(Arguments(Path("runs", config.run.name, path.name), overrides), config)


def test_only_a_run_with_checkpoints_is_extended(tmp_path):
    check_resumable(RunFolder(tmp_path), extend=False)
    with pytest.raises(InputError, match=r"run\.dir=FOLDER"):
        check_resumable(RunFolder(tmp_path), extend=True)
    with pytest.raises(InputError, match="--resume never"):
        Arguments(None, [], resume="never", extend=True)
