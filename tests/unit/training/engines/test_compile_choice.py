"""What `train.compile` comes to, and what CUDA graphs ask of the engine."""

from dataclasses import replace

import pytest
import torch
from helpers.commands import ROOT
from torch import nn

from mae_vit.config.load import load_config
from mae_vit.config.plan import Plan, make_plan
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines import compiling
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.compiling import choose_compiling
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim.optimizers import OptimizerOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def plan_of(*options: str, schema=PretrainConfig, name: str = "mae_base") -> tuple[PretrainConfig, Plan]:
    config = load_config(schema, ROOT / f"configs/{name}.yaml", options)
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
        (f"{LONG} train.compile=reduce-overhead", CUDA, True, "CUDA graphs"),
    ],
)
def test_what_compile_comes_to(gpu, options, device, on, why):
    chosen = choose_compiling(*plan_of(*options.split()), device)
    assert chosen.on == on
    assert why in str(chosen)
    assert str(chosen).startswith("yes" if on else "no")
    assert chosen.cuda_graphs == ("reduce-overhead" in options)


def test_networks_that_are_not_ours_are_not_compiled_unasked(gpu):
    options = ("model.name=timm:resnet18", "train.epochs=1000")
    asked = plan_of(*options, "train.compile=true", schema=FinetuneConfig, name="simple_cnn_cifar")
    assert choose_compiling(*asked, CUDA).on
    chosen = choose_compiling(*plan_of(*options, schema=FinetuneConfig, name="simple_cnn_cifar"), CUDA)
    assert not chosen.on
    assert "timm:resnet18" in chosen.why


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        (f"{LONG} train.compile=reduce-overhead", CPU, "which a CPU has not"),
        (
            f"{LONG} train.compile=reduce-overhead train.batch_size_per_device=256",
            CUDA,
            "not 16 micro-batches",
        ),
    ],
)
def test_cuda_graphs_are_refused_where_they_do_not_fit(gpu, options, device, said):
    with pytest.raises(InputError, match=said):
        choose_compiling(*plan_of(*options.split()), device)


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
    assert "Triton is not installed" in choose_compiling(config, plan, CUDA).why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "too old" in choose_compiling(config, plan, CUDA).why


class Replayed(Task):
    """Gives its results in the same memory at each call, as the replay of a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__(mean=[0.5], std=[0.5])
        self.weight = nn.Parameter(torch.ones(1))
        self.calls, self.loss, self.value = 0, torch.zeros(()), torch.zeros(2)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        self.calls += 1
        loss = (self.weight * self.calls).sum()
        self.value.fill_(self.calls)
        # The loss as well: its graph is the new one's, its memory the old.
        kept = self.loss
        loss.data = kept.data.copy_(loss.data)
        return ObjectiveOutput(loss, {"value": (self.value[0], self.value[1])})

    def evaluation_sums(self, batch):
        return {}

    def evaluation_metrics(self, sums):
        return {}

    def pictures(self, batch):
        return []


def test_what_a_step_returned_outlives_the_next_replay(monkeypatch):
    asked, marked = [], []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(options))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(1))
    adamw = OptimizerOptions("adamw", 0.0, betas=(0.9, 0.95), eps=1e-8)
    options = StepOptions(adamw, None, "fp32", 1, 1, compile=True, cuda_graphs=True)
    engine = TorchEngine(Replayed(), options, Ranks(), CPU)
    assert asked == [{"dynamic": False, "mode": "reduce-overhead"}]
    batch = Batch(torch.zeros(1, 1, 1, 1), torch.zeros(1), SampleKeys(0, 0, torch.arange(1)))
    first, second = engine.forward(batch), engine.forward(batch)
    assert (first.loss.item(), second.loss.item()) == (1, 2)
    assert [output.values["value"][0].item() for output in (first, second)] == [1, 2]
    assert len(marked) == 2
    engine.backward(second.loss)
    assert engine.objective.weight.grad.item() == 2
    with pytest.raises(AssertionError):
        TorchEngine(Replayed(), replace(options, accumulation=2), Ranks(), CPU)
