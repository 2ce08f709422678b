"""What `train.compile` comes to."""

import pytest
import torch

from mae_vit.config.load import load_config
from mae_vit.config.plan import Plan, make_plan
from mae_vit.config.presets import find_config
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.engines import build as compiling
from mae_vit.training.engines.build import choose_compiling

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def plan_of(*options: str, schema=PretrainConfig, name: str = "mae_base") -> tuple[PretrainConfig, Plan]:
    config = load_config(schema, find_config(name), options)
    return config, make_plan(config, num_samples=1_281_167, world_size=1)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with all that it takes."""
    monkeypatch.setattr(compiling, "missing_for_triton", lambda device: None)


LONG = "train.engine=torch train.batch_size_per_device=null train.epochs=null train.steps=10000 train.warmup_epochs=0"


@pytest.mark.parametrize(
    ("options", "device", "on", "why"),
    [
        ("", CUDA, True, "long enough"),
        ("", CPU, False, "off on CPUs"),
        (LONG, CUDA, True, "long enough"),
        (f"{LONG} train.steps=9999", CUDA, False, "9,999 micro-batches do not earn"),
        # 625 steps of 16 micro-batches are 10,000.
        (
            f"{LONG} train.steps=625 train.batch_size_per_device=256",
            CUDA,
            True,
            "long enough",
        ),
        (
            f"{LONG} train.steps=624 train.batch_size_per_device=256",
            CUDA,
            False,
            "9,984",
        ),
        ("run.deterministic=true", CUDA, False, "run.deterministic"),
        ("train.zero_stage=3", CUDA, False, "ZeRO 3"),
        ("train.compile=false", CUDA, False, "train.compile=false"),
        ("train.compile=true", CPU, True, "train.compile=true"),
        ("train.compile=true run.deterministic=true", CUDA, True, "train.compile=true"),
    ],
)
def test_what_compile_comes_to(gpu, options, device, on, why):
    chosen = choose_compiling(*plan_of(*options.split()), device)
    assert chosen.on == on
    assert why in str(chosen)
    assert str(chosen).startswith("yes" if on else "no")


def test_networks_that_are_not_ours_are_not_compiled_unasked(gpu):
    options = ("model.name=timm:resnet18", "train.epochs=1000")
    asked = plan_of(*options, "train.compile=true", schema=FinetuneConfig, name="simple_cnn_cifar")
    assert choose_compiling(*asked, CUDA).on
    chosen = choose_compiling(*plan_of(*options, schema=FinetuneConfig, name="simple_cnn_cifar"), CUDA)
    assert not chosen.on
    assert "timm:resnet18" in chosen.why


def test_a_machine_that_cannot_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    config, plan = plan_of()
    assert "Python.h" in choose_compiling(config, plan, CUDA).why
    (tmp_path / "Python.h").touch()
    assert choose_compiling(config, plan, CUDA).on
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert "no C compiler" in choose_compiling(config, plan, CUDA).why
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not" in choose_compiling(config, plan, CUDA).why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "too old" in choose_compiling(config, plan, CUDA).why
