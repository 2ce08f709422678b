"""The verdict of a run: whether it learned, against its own beginning, whether it was long enough, what is next."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import lines_of, summary_of
from helpers.report_files import change, page_of

from mae_vit.pretraining.report.run_record import RunRecord
from mae_vit.pretraining.report.verdict import verdict

# Of 100 steps: one that flattens, one that does not, one of noise.
FLAT = (0.4 + 0.6 * np.exp(-np.arange(100) / 12)).tolist()
STEEP = np.linspace(1.0, 0.5, 100).tolist()
NOISE = (0.7 + 0.003 * np.sin(np.arange(100) * 2.4)).tolist()
LEARNED, UNLEARNED, COLLAPSED = "It learned", "It unlearned", "It collapsed"
LONG_ENOUGH, TOO_SHORT = "was long enough", "was not long"


def verdict_of(losses, probe=None, start=None, rankme=None) -> str:
    """The verdict of a finished run with these losses, one a step, and a probe at its end."""
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    if probe is not None:
        lines[-1]["probe"] = {"few_shot_top1": probe}
    if rankme is not None:
        lines[-1]["heldout"] = {"rankme": rankme}
    summary = {"status": "done", "steps": len(lines), "total_steps": len(lines)}
    if start is not None:
        summary["probe_at_start"] = {"few_shot_top1": start[0], "images": start[1]}
    return " ".join(verdict(RunRecord(Path("runs/a"), summary=summary, lines=tuple(lines))))


@pytest.mark.parametrize(
    ("run", "named", "unnamed"),
    [
        (
            (FLAT, 0.5, (0.3, 500)),
            (LEARNED, "50.0%", "45.6% to 54.4%", "30.0%", "1 to 0.4", LONG_ENOUGH, "mae-vit finetune"),
            (),
        ),
        ((STEEP, 0.5, (0.3, 500)), (LEARNED, TOO_SHORT, "run.name=longer"), ()),
        # Of a loss from 0.7005 to 0.698, and 24.7 % of 150 images against 22.7 %, nobody knows more.
        ((NOISE, 0.247, (0.227, 150)), ("18.5% to 32.2%", "22.7%", "0.0% less"), (LEARNED, UNLEARNED)),
        ((NOISE,), ("mae-vit replay runs/a",), (LONG_ENOUGH,)),
        ((FLAT, 0.2, (0.5, 500)), (UNLEARNED,), (LEARNED,)),
        # At either end of the scale, where rounding has a say; and one image of a thousand.
        ((FLAT, 1.0, (1.0, 4)), ("100.0%",), (LEARNED, UNLEARNED)),
        ((FLAT, 0.0, (0.0, 4)), ("0.0%",), (LEARNED, UNLEARNED)),
        ((FLAT, 0.999, (1.0, 1000)), ("99.9%",), (LEARNED, UNLEARNED)),
        # The beginning is not known of a run whose folder was resumed from elsewhere.
        ((FLAT, 0.5), ("50.0%",), (LEARNED, "%)")),
        ((FLAT, 0.5, (0.3, 500), 1.4), (COLLAPSED,), (LEARNED,)),
        ((FLAT, 0.5, (0.3, 500), 2.9), (LEARNED,), (COLLAPSED,)),
        # More of the same would not mend it.
        ((STEEP, None, None, 1.4), (COLLAPSED,), ("run.name=longer",)),
    ],
)
def test_the_verdict_of_a_run(run, named, unnamed):
    text = verdict_of(*run)
    assert [part for part in named if part not in text] == [], text
    assert [part for part in unnamed if part in text] == [], text


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_each_state_is_named(run_folder, status):
    lines = lines_of(run_folder)[:4]
    lines[2]["loss"] = None  # fp16 has skipped it
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "lo')
    change(run_folder / "summary.json", status=status, steps=4)
    page = page_of(run_folder)
    assert re.search(rf"{status.capitalize()}[^.]* step 4 of 6", page)
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
