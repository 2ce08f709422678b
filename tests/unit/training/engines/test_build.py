"""Which engine a run is on, whether it is compiled, that its plan says so, and options that would do nothing."""

import pytest
import torch
from workers.device_sync import build_objective

from mae_vit.config import schema
from mae_vit.config.load import load_config
from mae_vit.config.plan import Plan, make_plan
from mae_vit.config.presets import find_config
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines import build as building
from mae_vit.training.engines.build import build_engine, choose_compiling
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.plan_text import describe_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PRESETS = {PretrainConfig: "mae_digits", FinetuneConfig: "simple_cnn_cifar"}
ZERO_1 = "train.zero_stage=1"


def config_of(*overrides: str, kind: type[Config] = PretrainConfig, name: str = "") -> Config:
    return load_config(kind, find_config(name or PRESETS[kind]), list(overrides))


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize(
    ("overrides", "world_size", "text"),
    [
        ([], 1, "torch (auto: one process)"),
        ([], 2, "deepspeed, ZeRO 0 (auto: several processes)"),
        ([ZERO_1], 1, "deepspeed, ZeRO 1 (auto: zero_stage=1)"),
        ([ZERO_1], 8, "deepspeed, ZeRO 1 (auto: several processes)"),
        (["train.engine=deepspeed"], 1, "deepspeed, ZeRO 0 (train.engine=deepspeed)"),
        (["train.engine=torch"], 8, "torch, DistributedDataParallel (train.engine=torch)"),
    ],
)
def test_the_engine_follows_from_the_processes(kind, overrides, world_size, text):
    config = config_of(*overrides, kind=kind)
    assert config.train.engine_on(world_size) == text.partition(" ")[0].strip(",")
    assert describe_engine(config, Ranks(world_size=world_size)) == text


def test_without_deepspeed_all_runs_are_on_torch(monkeypatch):
    monkeypatch.setattr(schema, "find_spec", lambda name: None)
    assert config_of().train.engine_on(4) == "torch"
    for asked in (ZERO_1, "train.engine=deepspeed"):
        with pytest.raises(InputError, match="deepspeed"):
            config_of(asked)


def test_one_process_is_on_torch():
    config = config_of("train.effective_batch_size=8", "train.precision=fp32")
    plan = make_plan(config, num_samples=64, world_size=1)
    assert type(build_engine(config, plan, build_objective("mae"), Ranks(), CPU)) is TorchEngine


def plan_of(*options: str, kind=PretrainConfig, name: str = "mae_base") -> tuple[Config, Plan]:
    config = config_of(*options, kind=kind, name=name)
    return config, make_plan(config, num_samples=1_281_167, world_size=1)


LONG = "train.engine=torch train.batch_size_per_device=null train.epochs=null train.steps=10000 train.warmup_epochs=0"
SPLIT = f"{LONG} train.batch_size_per_device=256"


@pytest.mark.parametrize(
    ("options", "device", "on", "why"),
    [
        ("", CUDA, True, "long enough"),
        ("", CPU, False, "off on CPUs"),
        (LONG, CUDA, True, "long enough"),
        (f"{LONG} train.steps=9999", CUDA, False, "9,999 micro-batches do not earn"),
        # 625 steps of 16 micro-batches are 10,000.
        (f"{SPLIT} train.steps=625", CUDA, True, "long enough"),
        (f"{SPLIT} train.steps=624", CUDA, False, "9,984"),
        ("run.deterministic=true", CUDA, False, "run.deterministic"),
        ("train.zero_stage=3", CUDA, False, "ZeRO 3"),
        ("train.compile=false", CUDA, False, "train.compile=false"),
        ("train.compile=true", CPU, True, "train.compile=true"),
        ("train.compile=true run.deterministic=true", CUDA, True, "train.compile=true"),
    ],
)
def test_what_compile_comes_to(monkeypatch, options, device, on, why):
    monkeypatch.setattr(building, "missing_for_triton", lambda device: None)
    chosen = choose_compiling(*plan_of(*options.split()), device)
    assert chosen.on == on
    assert why in str(chosen)
    assert str(chosen).startswith("yes" if on else "no")


def test_networks_that_are_not_ours_are_not_compiled_unasked(monkeypatch):
    monkeypatch.setattr(building, "missing_for_triton", lambda device: None)
    options = ("model.name=timm:resnet18", "train.epochs=1000")
    asked, unasked = (
        choose_compiling(*plan_of(*options, *more, kind=FinetuneConfig, name="simple_cnn_cifar"), CUDA)
        for more in (["train.compile=true"], [])
    )
    assert (asked.on, unasked.on) == (True, False)
    assert "timm:resnet18" in unasked.why


def test_a_machine_that_cannot_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(building.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(building.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    planned = plan_of()
    assert "Python.h" in choose_compiling(*planned, CUDA).why
    (tmp_path / "Python.h").touch()
    assert choose_compiling(*planned, CUDA).on
    for target, name, answer, why in (
        (building.shutil, "which", None, "no C compiler"),
        (building.importlib.util, "find_spec", None, "Triton is not"),
        (torch.cuda, "get_device_capability", (6, 1), "too old"),
    ):
        monkeypatch.setattr(target, name, lambda _, answer=answer: answer)
        assert why in choose_compiling(*planned, CUDA).why
