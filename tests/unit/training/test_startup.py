"""Before a run begins: its device, and its place in a Slurm array."""

import pytest

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.startup import as_array_task, choose_device


def config_of(name, *overrides):
    return load_config(PretrainConfig, find_config(name), overrides)


def test_a_slurm_job_without_a_gpu_trains_no_large_model_unless_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    large = config_of("mae_base")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert choose_device(large, Ranks()).type == "cpu"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(InputError, match=r"model.name=B: .*--gpus-per-node=1.* run\.device=cpu"):
        choose_device(large, Ranks())
    for meant in (config_of("mae_base", "run.device=cpu"), config_of("mae_digits")):
        assert choose_device(meant, Ranks()).type == "cpu"


def test_a_gpu_is_left_alone_where_the_cpu_is_asked_for(monkeypatch):
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
