"""What ranks compute and load with, as the plan says it, and where a GPU would wait."""

import os
from types import SimpleNamespace

import pytest
import torch
from helpers.commands import ROOT
from torch._inductor import config as inductor
from torch._inductor.async_compile import get_compile_threads

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.data.training_data import open_training_data
from mae_vit.data.views import check_pad
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime import cores as machine
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks

RANKS = Ranks(rank=3, world_size=16, local_rank=3, local_world_size=8)


@pytest.fixture
def opened(digits, monkeypatch):
    """Opens the digits for a rank of two nodes of eight: opened(cores, device, source)."""
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)

    def call(cores: int, device: str, source: str, samples=None, workers: str = "auto"):
        for name, value in {
            "SLURM_STEP_ID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "16",
            "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
            "SLURM_CPUS_PER_TASK": str(cores),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        words = [f"data.path={digits}", f"data.source={source}", f"data.workers={workers}"]
        config = load_config(PretrainConfig, ROOT / "configs" / "pretrain" / "mae_digits.yaml", words)
        return open_training_data(config, open_index(digits, "train"), samples, RANKS, torch.device(device))

    return call


@pytest.mark.parametrize(
    ("cores", "device", "source", "line"),
    [
        (12, "cuda", "tar", "12, 10 workers for each of 16 ranks"),
        (12, "cuda", "memory", "12, 0 workers for each of 16 ranks"),
        (12, "full cuda", "memory", "12, 4 workers for each of 16 ranks"),
        (12, "cpu", "memory", "12, 0 workers for each of 16 ranks"),
        (2, "cpu", "tar", "2, 1 worker for each of 16 ranks"),
    ],
)
def test_the_plan_names_cores_and_workers(opened, cores, device, source, line, monkeypatch):
    free = 2**20 if device == "full cuda" else 2**30  # the digits take 96 KB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**31))
    device = device.removeprefix("full ")
    assert opened(cores, device, source).describe_cores(RANKS) == line


def test_a_gpu_that_waits_for_its_images_is_warned_of(opened, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**31))
    (warning,) = opened(1, "cuda", "tar").core_warnings()
    said(warning)
    assert "3 cores" in opened(3, "cuda", "tar", samples=torch.arange(200).numpy()).core_warnings()[0]
    for cores, device, source in ((4, "cuda", "tar"), (1, "cuda", "memory"), (1, "cpu", "tar")):
        assert opened(cores, device, source).core_warnings() == []
    # Of a subset, too.
    assert opened(1, "cuda", "memory", samples=torch.arange(200).numpy()).core_warnings() == []


@pytest.mark.parametrize(("cores", "asked", "expected"), [(28, None, 7), (512, None, 32), (28, "3", 5)])
def test_ranks_share_the_cores_to_compile_with(monkeypatch, cores, asked, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", asked)
    threads = torch.get_num_threads()
    try:
        with inductor.patch(compile_threads=5):
            find_device(Ranks(rank=1, world_size=4, local_rank=1, local_world_size=4))
            assert get_compile_threads() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("width", "one_size"), [((64, 64), (32, 64)), ((32, 40), None)])
def test_a_shift_is_of_images_of_the_networks_size(width, one_size):
    info = SimpleNamespace(height=(32, 32), width=width)
    index = SimpleNamespace(split="train", split_info=info, one_size=one_size)
    with pytest.raises(InputError, match="random_resized"):
        check_pad("pad", index, (32, 32))
    check_pad("none", index, (32, 32))
