"""Ranks join by their own device, wait longer than the watchdog does, and leave the group when they are done."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from helpers.commands import ROOT

from mae_vit.config.load import load_config
from mae_vit.config.plan import make_plan
from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.doctor import check_exchange, join_ranks
from mae_vit.runtime.device import find_device
from mae_vit.runtime.failures import run_to_exit_code
from mae_vit.runtime.process_group import MARGIN_S, give_up_after, join, leave
from mae_vit.runtime.ranks import Ranks, find_ranks, free_port
from mae_vit.runtime.signals import PLACE_ON_NODE, is_local_rank_zero
from mae_vit.training.engines.build import init_process_group


@pytest.fixture
def groups(monkeypatch):
    """What process groups were asked for; none is made, and nobody met. Each of eight ranks has a GPU."""
    made, store = [], torch.distributed.HashStore()
    for rank in range(8):
        store.set(f"gpu/{rank}", f"GPU-{rank}")
    monkeypatch.setattr("mae_vit.runtime.process_group.meet", lambda ranks, timeout: store)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *args, **how: made.append((args, how))
    )
    return made


@pytest.fixture
def own_gpu(monkeypatch):
    """The fourth of eight ranks, whose launcher shows it one GPU: its own."""
    get_accelerator()  # DeepSpeed looks once in a process: not at what is pretended here
    place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    # So that what is set in its place goes after the test.
    monkeypatch.setenv(PLACE_ON_NODE, "")
    monkeypatch.delenv(PLACE_ON_NODE)
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-3"))
    return taken


def config_of(*overrides: str) -> PretrainConfig:
    return load_config(PretrainConfig, ROOT / "configs/pretrain/mae_digits.yaml", list(overrides))


def test_a_rank_that_sees_its_own_gpu_alone_takes_number_0_everywhere(own_gpu, groups, monkeypatch):
    import deepspeed

    from mae_vit.training.engines import deepspeed_engine

    local_ranks, note = [], lambda **how: local_ranks.append(os.environ["LOCAL_RANK"])
    monkeypatch.setattr(deepspeed, "init_distributed", note)
    ranks = find_ranks()
    device = find_device(ranks)
    assert (ranks.local_rank, device, own_gpu) == (3, torch.device("cuda", 0), [0])
    init_process_group(config_of("train.engine=deepspeed"), device, ranks)
    ((backend,), how) = groups[0]
    assert (backend, how["device_id"], how["rank"], how["world_size"]) == ("nccl", device, 3, 8)
    for _ in range(2):
        deepspeed_engine._use_process_group(device)
        # ZeRO 3 reads it again, later.
        assert os.environ["LOCAL_RANK"] == "0"
        assert not is_local_rank_zero()
    assert local_ranks == ["0", "0"]


@pytest.mark.parametrize("rank", [3, 6])
def test_ranks_that_share_a_gpu_are_refused_on_all_ranks_of_the_node(own_gpu, groups, rank):
    if rank == 3:
        init_process_group(config_of(), torch.device("cuda", 0), find_ranks())
        return
    # The seventh sees the GPU of the fourth.
    with pytest.raises(InputError, match="8 ranks on this node share 7 GPUs"):
        init_process_group(config_of(), torch.device("cuda", 0), Ranks(6, 8, 6, 8))


@pytest.mark.parametrize("local_rank", [0, 3])
def test_more_ranks_than_gpus_are_refused_by_the_rank_that_prints_too(own_gpu, monkeypatch, local_rank):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="4 ranks on this node, which has 2 GPUs; start 2"):
        find_device(Ranks(local_rank, 4, local_rank, 4))


def test_the_first_of_a_node_stays_first(monkeypatch):
    # Of a node that shows all its GPUs, the places are the numbers.
    for name, place in (("LOCAL_RANK", "0"), ("LOCAL_RANK", "5"), ("SLURM_LOCALID", "2")):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setenv(name, place)
        assert is_local_rank_zero() == (place == "0")


def test_collectives_outlast_the_watchdog_and_one_gpu_alone_is_bound_to_no_peers(groups):
    cpu, two = torch.device("cpu"), Ranks(world_size=2)
    for engine in ("deepspeed", "torch"):
        for timeout in ("100", "null"):
            options = (f"train.engine={engine}", f"run.hang_timeout_s={timeout}")
            init_process_group(config_of(*options), cpu, two)
    # Four times as long as in a step it waits for an evaluation or a save.
    expected = 2 * [timedelta(seconds=4 * 100 + MARGIN_S), timedelta(days=1)]
    assert [how["timeout"] for _, how in groups] == expected
    assert MARGIN_S >= 60
    join(Ranks(), torch.device("cuda", 0), timeout=give_up_after(1.0))
    assert groups[-1][0] == ("nccl",)
    assert "device_id" not in groups[-1][1]


def test_what_deepspeed_exchanges_by_waits_as_long():
    """Its clone of the group of all ranks would have torch's default, of 10 minutes for NCCL."""
    from deepspeed.utils import groups

    from mae_vit.pretraining.setup import build_objective
    from mae_vit.training.engines.build import build_engine

    cpu = torch.device("cpu")
    join(find_ranks(), cpu, timeout=timedelta(seconds=4321))
    try:
        config = config_of(
            "train.engine=deepspeed", "model.embed_dim=16", "model.depth=1", "model.num_heads=2"
        )
        info = EncoderInfo(config.model.geometry(), (0.5,), (0.25,), "mae")
        plan = make_plan(config, num_samples=1000, world_size=1)
        engine = build_engine(config, plan, build_objective(config, info, num_classes=0), Ranks(), cpu)
        clone = groups._get_data_parallel_group()
        assert clone is not torch.distributed.group.WORLD
        assert clone._get_backend(cpu).options._timeout == timedelta(seconds=4321)
        engine.close()
        assert not torch.distributed.is_initialized()
    finally:
        leave()


def test_the_doctor_joins_as_a_run_does(own_gpu, groups, monkeypatch):
    class Store(dict):
        def set(self, key, value) -> None:
            self[key] = value.encode()

    others = {f"doctor/{rank}": b"cuda" for rank in range(8)}
    others |= {f"gpu/{rank}": f"GPU-{rank}".encode() for rank in range(8)}
    monkeypatch.setattr("mae_vit.pretraining.doctor.meet", lambda ranks, timeout: Store(others))
    ranks = find_ranks()
    assert join_ranks(ranks, find_device(ranks)).status == "ok"
    # A rank without a GPU: all join by the CPU, to say so.
    assert join_ranks(ranks, torch.device("cpu")).status == "ok"
    assert join_ranks(ranks, None).status == "ok"
    joined = [(backend, how.get("device_id")) for (backend,), how in groups]
    assert joined == [("nccl", torch.device("cuda", 0)), ("gloo", None), ("gloo", None)]
    monkeypatch.setattr(
        "mae_vit.pretraining.doctor.gather_objects",
        lambda value, ranks: [value, ("cpu", "node7")],
    )
    check = check_exchange(ranks, torch.device("cuda", 0))
    assert check.status == "FAIL"
    assert "cpu (on node7)" in check.text


def test_jobs_that_end_well_leave_the_group():
    def joined(code: int) -> int:
        join(Ranks(), torch.device("cpu"), timeout=timedelta(seconds=60))
        return code

    def failing() -> int:
        joined(0)
        raise InputError("no")

    try:
        for code in (0, 75):
            assert run_to_exit_code(lambda code=code: joined(code)) == code
            assert not torch.distributed.is_initialized()
        # Of ranks that fail none knows who is still there to leave with.
        assert run_to_exit_code(failing) == 2
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
