"""`train.precision`: what "auto" is on which device, and who is warned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from workers.plain_loop import Normed, batch_of

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training import startup
from mae_vit.training.engines import precision
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.precision import Chosen, choose_precision
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.identity import Identity, check_identity
from mae_vit.training.optim import OptimizerOptions
from mae_vit.training.setup import Setup

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def processor(monkeypatch, *, avx512_bf16=False, amx=False, slowdown=0.5):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(precision, "_slowdown", lambda _: slowdown)


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ({}, ("fp32", "auto: this processor has neither AVX512_BF16 nor AMX")),
        ({"avx512_bf16": True}, ("bf16", "auto: this processor has bf16 instructions")),
        ({"amx": True}, ("bf16", "auto: this processor has bf16 instructions")),
        (
            {"avx512_bf16": True, "amx": True, "slowdown": 40.0},
            ("fp32", "auto: bf16 is slower, though this processor has instructions for it"),
        ),
    ],
)
def test_auto_takes_bf16_where_the_processor_has_it_and_a_product_confirms_it(monkeypatch, features, chosen):
    processor(monkeypatch, **features)
    assert choose_precision("auto", CPU) == Chosen(*chosen)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_auto_takes_bf16_on_gpus_that_have_it(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    chosen = choose_precision("auto", CUDA)
    assert (chosen.precision, chosen.warning) == (expected, "")
    assert ("has no bf16" in chosen.why) == (expected == "fp32")
    assert bool(choose_precision("bf16", CUDA).warning) == (expected == "fp32")
    assert choose_precision("auto", torch.device("mps")).precision == "fp32"


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_an_explicit_precision_that_is_slow_is_kept_with_a_warning(monkeypatch, asked):
    processor(monkeypatch, slowdown=48.3)
    slow = choose_precision(asked, CPU)
    assert (slow.precision, slow.why) == (asked, f"train.precision={asked}")
    assert slow.warning.startswith(f"{asked} is 48 ")
    assert "auto is fp32" in slow.warning
    assert str(slow) == f"{asked} (train.precision={asked}); warning: {slow.warning}"
    processor(monkeypatch, avx512_bf16=True)
    assert choose_precision(asked, CPU).warning == ""
    assert choose_precision("fp32", CPU) == Chosen("fp32", "train.precision=fp32")


def test_the_ratio_is_measured_and_threads_stay(monkeypatch):
    monkeypatch.setattr(precision, "_SIDE", 32)
    threads = torch.get_num_threads()
    assert 0 < precision._slowdown.__wrapped__("bf16") < 10_000
    assert torch.get_num_threads() == threads


def test_ranks_take_the_weakest(monkeypatch):
    both = [Chosen("bf16", "of rank 0"), Chosen("fp32", "of rank 1")]
    for by_rank in (both, both[:1]):
        monkeypatch.setattr(startup, "gather_objects", lambda *_, by_rank=by_rank: by_rank)
        assert startup.agree_on_precision("auto", CPU, None) == by_rank[-1]


class Bare(Setup):
    build = source = batch_size = None


def test_a_run_resumes_in_the_precision_that_it_began_with(monkeypatch):
    processor(monkeypatch, slowdown=48.0)
    now = Identity({"train.precision": "auto", "run.seed": 0})
    saved = {"train.precision": "bf16", "run.seed": 0}
    check_identity(saved, now, "run", otherwise="")
    config = load_config(PretrainConfig, find_config("mae_digits"), ["train.precision=auto"])
    here = choose_precision("auto", CPU)
    for checkpoint, expected in ((SimpleNamespace(identity=saved), "bf16"), (None, "fp32")):
        setup = Bare(config, Ranks(), CPU, SimpleNamespace())
        settled, chosen = startup.settle_precision(setup, checkpoint, here)
        assert settled.config.train.precision == chosen.precision == expected
        assert chosen.why.startswith("auto: ")
        assert ("48 times slower" in chosen.warning) == (checkpoint is not None)


def test_an_overflow_leaves_no_trace_in_statistics():
    options = StepOptions(OptimizerOptions("sgd", 0.0, momentum=0.9), None, "fp16", 16, 1)
    engine = TorchEngine(Normed(), options, Ranks(), CPU)
    good = batch_of(0)

    def step(batch) -> bool:
        engine.backward(engine.forward(batch).loss)
        return engine.step(0.1).skipped

    overflowing = replace(good, images=good.images.float() * 1e9)
    before = engine.gather()
    assert step(overflowing)
    assert not step(good)
    after = engine.gather()
    for state in (before, after):
        engine.restore(state)
        assert step(overflowing)
        now = engine.gather().buffers
        assert all(tensor.equal(now[name]) for name, tensor in state.buffers.items())
    assert not after.buffers["layers.1.running_mean"].equal(before.buffers["layers.1.running_mean"])
    after.buffers["layers.1.running_mean"][0] = float("nan")
    assert not after.is_finite()
