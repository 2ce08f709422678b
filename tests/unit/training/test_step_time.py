"""The time that a plan tells: from real steps, as a range, or why there is none."""

from types import SimpleNamespace

import pytest
import torch
from helpers.commands import ROOT, SMALL_PRETRAIN

from mae_vit.config.load import load_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import Setup, set_up
from mae_vit.runtime.ranks import ALONE, Ranks
from mae_vit.training import step_time
from mae_vit.training.plan_text import describe_time
from mae_vit.training.step_time import StepTime, time_steps


@pytest.fixture
def slow(digits, monkeypatch):
    """Steps of a network that takes 2 ms of processor time for an image, `slower` times as long by the clock."""
    threads, clock = torch.get_num_threads(), SimpleNamespace(passed=0.0, had=0.0, slower=2)
    words = [*SMALL_PRETRAIN, f"data.path={digits}"]
    setup = set_up(load_config(PretrainConfig, ROOT / "configs/pretrain/mae_digits.yaml", words), ALONE)
    monkeypatch.setattr(step_time, "_clock", lambda device: (clock.passed, clock.had))
    monkeypatch.setattr(step_time, "time", SimpleNamespace(monotonic=lambda: clock.passed))

    usual_build = Setup.build

    def build(setup):
        task = usual_build(setup)

        def forward(batch, usual=task.forward):
            clock.passed += 0.002 * clock.slower * len(batch.images)
            clock.had += 0.002 * len(batch.images)
            return usual(batch)

        task.forward = forward
        return task

    monkeypatch.setattr(Setup, "build", build)

    def tried(slower=2):
        clock.slower = slower
        return time_steps(setup, "fp32")

    tried.clock = clock
    yield tried
    torch.set_num_threads(threads)


def test_the_range_is_from_a_machine_of_its_own_to_one_as_busy_as_now(slow, monkeypatch):
    # A slow step is tried with fewer images.
    for most_s, images in ((1.0, 128), (0.051, 25)):
        monkeypatch.setattr(step_time, "_ONE_S", most_s)
        tried = slow()
        assert (tried.tries >= 3, tried.images) == (True, images)
        assert tried.least_s == pytest.approx(0.002 * 128 / step_time._SLACK)
        assert tried.most_s == pytest.approx(0.004 * 128 * step_time._SLACK)
    monkeypatch.setattr(step_time, "_MOST_PARAMETERS_ON_CPU", 1000)
    assert slow() is None


def test_however_busy_the_machine_its_tries_are_as_large_as_on_a_quiet_one(slow, monkeypatch):
    """A few images would have the fixed costs of a whole micro-batch."""
    tried = slow(slower=100)
    assert (tried.tries, tried.images) == (1, 128)
    assert tried.least_s == pytest.approx(0.002 * 128 / step_time._SLACK)


def test_of_a_step_that_takes_seconds_one_is_enough(slow, monkeypatch):
    monkeypatch.setattr(step_time, "_PATIENCE_S", 0.003)
    tried = slow(slower=1)
    assert (tried.tries, tried.images, slow.clock.had) == (1, 2, pytest.approx(0.004))
    assert tried.least_s == pytest.approx(0.002 * 128 / step_time._SLACK)


def test_a_plan_tells_a_range_or_why_there_is_none():
    plan = SimpleNamespace(total_steps=1000)
    for tried, expected in (
        (
            StepTime(1.0, 2.0, 5, 128),
            "0:16:40 to 0:33:20, from 5 steps of 128 images timed here just now, not",
        ),
        (None, "not estimated: the network is too large"),
        (StepTime(30_000.0, 32_000.0, 2, 1), "over a year"),
    ):
        assert describe_time(plan, Ranks(), tried).startswith(expected)
    assert describe_time(plan, Ranks(), StepTime(1.0, 2.0, 5, 128), done=940).startswith("0:01:00 to 0:02:00")
    assert "communication" in describe_time(plan, Ranks(0, 2), StepTime(1.0, 2.0, 5, 128))
