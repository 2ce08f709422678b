"""The verdict of a run: whether it learned, against its own beginning, whether it was long enough, what is next."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import lines_of, summary_of
from unit.pretraining.report.run_files import change, page_of

from mae_vit.pretraining.report.run_record import RunRecord
from mae_vit.pretraining.report.verdict import verdict


def said(losses, *, probe=None, start=None, status="done", rankme=None, train=None) -> str:
    """The verdict of a run with these losses, one a step, and a probe at its end."""
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    if probe is not None:
        lines[-1]["probe"] = {"few_shot_top1": probe}
    if rankme is not None:
        lines[-1]["heldout"] = {"rankme": rankme}
    summary = {"status": status, "steps": len(lines), "total_steps": len(lines)}
    if start is not None:
        summary["probe_at_start"] = {"few_shot_top1": start[0], "images": start[1]}
    config = {"train": train or {"epochs": 10}}
    return " ".join(verdict(RunRecord(Path("runs/a"), config=config, summary=summary, lines=tuple(lines))))


# Of 100 steps: one that flattens, one that does not, one of noise.
FLAT = (0.4 + 0.6 * np.exp(-np.arange(100) / 12)).tolist()
STEEP = np.linspace(1.0, 0.5, 100).tolist()
NOISE = (0.7 + 0.003 * np.sin(np.arange(100) * 2.4)).tolist()


def test_a_run_that_learned_and_was_long_enough():
    text = said(FLAT, probe=0.5, start=(0.3, 500))
    assert "It learned: a linear layer on its features names 50.0% of held-out images right " in text
    assert "(95 % interval of 500 images: 45.6% to 54.4%), before training 30.0%." in text
    assert "The task was learned: the training loss went from 1 to 0.4" in text
    assert "It was long enough" in text
    assert "Next: use it (`mae-vit finetune --ckpt runs/a`)" in text


def test_a_run_that_still_falls():
    text = said(STEEP, probe=0.5, start=(0.3, 500), train={"epochs": None, "steps": 100})
    assert "It was not long enough: the loss still fell at the end." in text
    assert "Next: train longer, in a folder of its own (train.steps=200 run.name=longer)." in text


def test_noise_is_no_learning():
    """Of a loss from 0.7005 to 0.698, and 24.7 % of 150 images against 22.7 %, nobody knows more."""
    text = said(NOISE, probe=0.247, start=(0.227, 150))
    assert "So few images do not show whether it learned: " in text
    assert "(95 % interval of 150 images: 18.5% to 32.2%), before training 22.7%." in text
    assert "The task was hardly learned: the training loss went from 0.7 to 0.6999, 0.0% less." in text
    text = said(NOISE)
    assert "Next: look at what it trains on (`mae-vit replay runs/a --step 1`)" in text


def test_a_run_that_is_worse_than_its_beginning():
    assert "It unlearned: " in said(FLAT, probe=0.2, start=(0.5, 500))
    # The beginning is not known of a run whose folder was resumed from elsewhere.
    assert "how many it did before training is not known" in said(FLAT, probe=0.5)


@pytest.mark.parametrize(("rank", "collapsed"), [(1.4, True), (2.9, False)])
def test_a_collapse_of_features_is_named(rank, collapsed):
    text = said(FLAT, probe=0.5, start=(0.3, 500), rankme=rank)
    assert ("It collapsed: " in text) == collapsed
    assert ("It learned: " in text) != collapsed
    # More of the same would not mend it.
    assert ("train longer" in said(STEEP, rankme=rank)) != collapsed


@pytest.mark.parametrize(
    ("status", "begin"),
    [
        ("running", "Running, step 4 of 6 when this page was written. "),
        ("interrupted", "Interrupted after saving at step 4 of 6 (the same command resumes). "),
        ("failed", "Failed at step 4 of 6. "),
    ],
)
def test_each_state_is_named(run_folder, status, begin):
    lines = lines_of(run_folder)[:4]
    lines[2]["loss"] = None  # fp16 has skipped it
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "lo')
    change(run_folder / "summary.json", status=status, steps=4)
    page = page_of(run_folder)
    assert begin in page
    assert ("Next: " in page) == (status == "failed")


def test_a_run_measures_the_weights_that_it_begins_with(run_folder):
    """So that the accuracy of its probe has something to stand beside."""
    start, probe = summary_of(run_folder)["probe_at_start"], summary_of(run_folder)["probe"]
    assert start.keys() - probe.keys() == {"images"}
    assert start["images"] > 0
    assert f"before training {start['few_shot_top1']:.1%}" in page_of(run_folder)


def test_axes_reach_zero(run_folder):
    lines = lines_of(run_folder)
    for line in lines:
        line["loss"] = 0.7 + 1e-3 * (line["step"] % 2)
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    chart = re.search(r"<h3>training loss</h3>(<svg.*?</svg>)", page_of(run_folder), re.DOTALL)[1]
    ticks = [float(text) for text in re.findall(r"<text[^>]*>(0\.\d+)</text>", chart)]
    assert min(ticks) == 0.0
