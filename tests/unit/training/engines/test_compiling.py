"""Whether a run is compiled, and as CUDA graphs, against what was measured; what a graph's step returns."""

import json

import pytest
import torch
from helpers.commands import ROOT
from torch import nn

from mae_vit.config.load import load_config
from mae_vit.config.plan import make_plan
from mae_vit.config.presets import find_config
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines import compiling
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.compiling import Compiling, choose_compiling, predict_seconds
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PEAK = 989e12


def costs_of(encoder_parameters: int, flops: float, launches: int) -> Estimate:
    return Estimate(encoder_parameters, encoder_parameters, 0, flops, 0, 2, launches=launches)


# As `estimate` counts them.
B16, L16 = costs_of(85_798_656, 57.2e9, 490), costs_of(303_301_632, 122.9e9, 690)
TI4, CONTRAST = costs_of(5_360_832, 1.2456e9, 426), costs_of(1_204_608, 0.299e9, 342)
TI4_CONTRAST = costs_of(5_360_832, 1.1394e9, 438)


def step_ms(key: str) -> float:
    lines = (ROOT / "docs/results/gpu/step_h100.jsonl", ROOT / "docs/results/gpu/rates.jsonl")
    found = [json.loads(line) for path in lines for line in path.open()]
    return next(line.get("ms") or line["ms_per_step"] for line in found if line["key"] == key)


@pytest.mark.parametrize(
    ("key", "costs", "batch_size", "how"),
    [
        ("B-16_ours_compiled_b256", B16, 256, "compiled"),
        ("L-16_ours_compiled_b128", L16, 128, "compiled"),
        ("Ti-4_ours_compiled_b4096", TI4, 4096, "compiled"),
        ("Ti-4_x_256_ours_reduce-overhead_b256", TI4, 256, "graphs"),
        ("B/16 ours", B16, 256, "eager"),  # on an H200
        ("B/16 ours compiled", B16, 256, "compiled"),
    ],
)
def test_a_step_takes_the_time_that_was_measured(key, costs, batch_size, how):
    predicted = getattr(predict_seconds(costs, batch_size, PEAK), how)
    assert 1e3 * predicted == pytest.approx(step_ms(key), rel=0.1)


def run_of(file: str, name: str) -> dict:
    return json.loads((ROOT / "docs/results/gpu" / file).read_text())[name]


def test_a_small_network_takes_the_time_that_was_measured():
    measured = 512 / run_of("runs_h100.json", "contrast_from_mae_146")["images_per_s"]
    assert predict_seconds(CONTRAST, 512, PEAK).eager == pytest.approx(measured, rel=0.1)
    run = run_of("runs_h200.json", "contrast_ti4_200")
    slow = (1 - run["data_wait_share"]) * 1024 / run["images_per_s"]
    # A host that took twice as long as another.
    assert predict_seconds(TI4_CONTRAST, 1024, PEAK).compiled == pytest.approx(slow, rel=0.4)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H100, and all that compiling takes."""
    monkeypatch.setattr(compiling, "missing_for_triton", lambda device: None)
    monkeypatch.setattr(
        compiling, "peak_flops", lambda device, precision: None if precision == "fp32" else PEAK
    )


LONG = (
    *("train.engine=torch", "train.batch_size_per_device=null", "train.epochs=null", "train.warmup_epochs=0"),
    "train.steps=20000",
)


def choose(
    *options: str, costs: Estimate | None = B16, batch_size: int = 256, world_size: int = 1, device=CUDA
) -> Compiling:
    words = (*LONG, f"train.effective_batch_size={batch_size}", *options)
    config = load_config(PretrainConfig, find_config("mae_base"), words)
    plan = make_plan(config, num_samples=1_281_167, world_size=world_size)
    return choose_compiling(config, plan, device, costs)


@pytest.mark.parametrize(
    ("case", "on", "graphs"),
    [
        ({}, True, False),  # a long run
        ({"options": ["train.steps=20"]}, False, False),
        ({"costs": CONTRAST, "batch_size": 512, "options": ["train.steps=14162"]}, True, True),
        ({"costs": TI4, "batch_size": 4096}, True, False),
        ({"costs": TI4}, True, True),
        ({"costs": TI4, "options": ["train.steps=1000"]}, False, False),
        ({"costs": TI4, "batch_size": 512, "options": ["train.batch_size_per_device=256"]}, True, False),
        ({"costs": TI4, "batch_size": 512, "world_size": 2}, True, False),
        ({"costs": TI4, "options": ["train.engine=deepspeed"]}, True, False),
        ({"costs": TI4, "options": ["train.compile=true"]}, True, False),
        ({"options": ["train.compile=false"]}, False, False),
        ({"options": ["run.deterministic=true"]}, False, False),
        ({"options": ["train.engine=deepspeed", "train.zero_stage=3"]}, False, False),
        ({"options": ["train.engine=deepspeed", "train.zero_stage=2"], "world_size": 2}, False, False),
        ({"options": ["train.engine=deepspeed", "train.zero_stage=2"]}, True, False),
        ({"device": CPU}, False, False),
        ({"device": CPU, "options": ["train.compile=true"]}, True, False),
        ({"costs": None}, False, False),
        ({"costs": TI4_CONTRAST, "batch_size": 1024, "options": ["train.steps=9600"]}, True, True),
        ({"options": ["train.precision=fp32"]}, True, False),
    ],
)
def test_a_run_is_compiled_where_it_saves_time(gpu, said, case, on, graphs):
    case = dict(case)
    chosen = choose(*case.pop("options", []), **case)
    assert (chosen.on, chosen.cuda_graphs) == (on, graphs)
    said(chosen)


def test_networks_that_are_not_ours_are_not_compiled_unasked(gpu, said):
    chosen = []
    for network in ("timm:resnet18", "SmallResNet"):
        options = [f"model.name={network}", "train.epochs=1000"]
        config = load_config(FinetuneConfig, find_config("simple_cnn_cifar"), options)
        plan = make_plan(config, num_samples=1_281_167, world_size=1)
        chosen.append(choose_compiling(config, plan, CUDA, B16))
    assert [choice.on for choice in chosen] == [False, True]
    said(chosen[0])


def test_a_machine_that_cannot_compile(monkeypatch, tmp_path, said):
    monkeypatch.setattr(compiling, "peak_flops", lambda device, precision: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    said(compiling.missing_for_triton(CUDA))
    (tmp_path / "Python.h").touch()
    assert choose().on
    for target, name, answer in (
        (compiling.shutil, "which", None),
        (compiling.importlib.util, "find_spec", None),
        (torch.cuda, "get_device_capability", (6, 1)),
    ):
        monkeypatch.setattr(target, name, lambda _, answer=answer: answer)
        said(compiling.missing_for_triton(CUDA))


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


def test_what_a_step_returned_outlives_the_next_replay(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    asked, marked = [], []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(options))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(1))
    adamw = OptimizerOptions("adamw", 0.0, betas=(0.9, 0.95))
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
