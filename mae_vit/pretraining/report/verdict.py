"""A run's verdict in words: how it ended, whether it learned, whether it was long enough, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from statistics import fmean
from typing import Any

from mae_vit.core.messages import count_of
from mae_vit.evaluation.metrics import interval_of_share
from mae_vit.pretraining.report.run_record import RunRecord

# Features of a lower effective rank are nearly the same for all images. A fall alone is no warning: in our runs of MAE
# the rank falls to a third while the probes improve (docs/results/rankme.json).
_COLLAPSED = 2.0
# A loss that fell by a smaller share of its first value did not learn. Ours: a run that learns loses 20 % and more.
_LEAST_FALL = 0.05
# A loss whose last fifth brought a larger share of its whole fall still falls. Ours: after a cosine schedule a run of
# full length has about 3 % there, and a line from start to end has 22 %.
_STILL_FALLING = 0.06
# Fewer values do not tell a trend from noise.
_FEWEST_VALUES = 5
_PROBE = "few_shot_top1"
Points = Sequence[tuple[int, float]]


def verdict(record: RunRecord) -> list[str]:
    """Returns sentences: the state, what was learned, whether the run was long enough, the next step."""
    if not record.lines:
        return [f"{_state(record)}.", "Nothing was logged yet."]
    sentences = [f"{_state(record)}."]
    ranks = values_of(record.lines, "rankme", "heldout")
    if ranks and ranks[-1][1] < _COLLAPSED:
        rank = f"effective rank {ranks[-1][1]:.3g}, 1 is the least"
        sentences.append(f"It collapsed: all images have nearly the same features ({rank}).")
        # A longer run would not mend a collapse.
        return [*sentences, *_next(record, False, None)]
    by_probe, probe_sentences = _by_probe(record)
    by_loss, loss_sentence = _by_loss(record)
    falling = _still_falling(record)
    sentences += [*probe_sentences, loss_sentence]
    if falling is not None:
        sentences.append(
            "It was not long enough: the loss still fell at the end."
            if falling
            else "It was long enough: the loss hardly fell in the last fifth."
        )
    return [*sentences, *_next(record, by_loss if by_probe is None else by_probe, falling)]


def _state(record: RunRecord) -> str:
    total = record.summary.get("total_steps")
    at = f"step {record.step:,}" + (f" of {total:,}" if total else "")
    states = {
        "done": f"Finished, {count_of(record.step, 'step')}",
        "running": f"Running, {at} when this page was written",
        "interrupted": f"Interrupted after saving at {at} (the same command resumes)",
        "failed": f"Failed at {at}",
    }
    return states.get(record.summary.get("status", ""), f"In an unknown state, {at}")


def _by_probe(record: RunRecord) -> tuple[bool | None, list[str]]:
    """Compares the online probe with its score on random weights; None where nobody can tell."""
    scores = values_of(record.lines, _PROBE, "probe")
    if not scores:
        return None, []
    score = scores[-1][1]
    now = f"linear layer on its features names {score:.1%} of held-out images right"
    start = record.summary.get("probe_at_start")
    if not start:
        return None, [f"A {now}; how many it did before training is not known."]
    first, images = start[_PROBE], start["images"]
    low, high = interval_of_share(score, images)
    evidence = (
        f"a {now} (95 % interval of {images:,} images: {low:.1%} to {high:.1%}), before training {first:.1%}."
    )
    if low > first:
        return True, [f"It learned: {evidence}"]
    if high < first:
        return False, [f"It unlearned: {evidence}"]
    return None, [f"So few images do not show whether it learned: {evidence}"]


def _by_loss(record: RunRecord) -> tuple[bool | None, str]:
    name, points = _losses(record)
    if not points:
        return None, "No finite loss was logged."
    values = [value for _, value in points]
    first, last = values[0], fmean(values[-max(1, len(values) // 10) :])
    if len(values) == 1:
        return None, f"The {name} is {last:.4g}; one value shows no course."
    course = f"the {name} went from {first:.4g} to {last:.4g}"
    if first <= 0:
        return None, f"T{course[1:]}."
    fall = (first - last) / first
    if fall >= _LEAST_FALL:
        return True, f"The task was learned: {course}, {fall:.0%} less."
    return False, f"The task was hardly learned: {course}, {f'{fall:.1%}' if fall > 0 else 'no'} less."


def _still_falling(record: RunRecord) -> bool | None:
    """Whether the end brought much of the fall; None where the run has not ended or too few values tell."""
    _, points = _losses(record)
    if record.summary.get("status") != "done" or len(points) < _FEWEST_VALUES:
        return None
    end, first = points[-1][0], points[0][1]
    last = [value for step, value in points if step > 0.8 * end]
    before = [value for step, value in points if 0.6 * end < step <= 0.8 * end]
    fall = first - fmean(last)
    # Noise has no end to wait for.
    if not before or fall < _LEAST_FALL * abs(first):
        return None
    return (fmean(before) - fmean(last)) / fall > _STILL_FALLING


def _next(record: RunRecord, learned: bool | None, falling: bool | None) -> list[str]:
    run, status = quote(str(record.path)), record.summary.get("status")
    if status in ("running", "interrupted"):
        return []
    if status == "failed":
        todo = "read the end of its log, and the incidents below if there are any; the same command resumes"
    elif learned is False and not falling:
        todo = (
            f"look at what it trains on (`mae-vit replay {run} --step 1`), then try other learning rates: a "
            "tenth of this one, and three times it"
        )
    elif falling:
        train = record.section("train")
        lengths = [
            f"train.{key}={2 * train[key]:.15g}" for key in ("epochs", "steps", "samples") if train.get(key)
        ]
        longer = lengths[0] if lengths else "a larger train.epochs"
        todo = f"train longer, in a folder of its own ({longer} run.name=longer)"
    elif learned is None:
        todo = (
            f"compare it with random weights on labeled images (`mae-vit finetune --ckpt {run} "
            "finetune.mode=knn`)"
        )
    else:
        todo = f"use it (`mae-vit finetune --ckpt {run}`), look into it (`mae-vit inspect --ckpt {run}`)"
    return [f"Next: {todo}."]


def _losses(record: RunRecord) -> tuple[str, Points]:
    """The loss of held-out images, which noise and over-fitting blur least; else that of training."""
    held_out = values_of(record.lines, "loss", "heldout")
    if len(held_out) >= _FEWEST_VALUES:
        return "held-out loss", held_out
    return "training loss", values_of(record.lines, "loss")


def values_of(
    lines: Sequence[Mapping[str, Any]], name: str, group: str | None = None
) -> list[tuple[int, float]]:
    """Returns (step, value) of a metric, of `group` if it is in one, where it is a finite number."""
    values = [(line["step"], (line if group is None else line.get(group, {})).get(name)) for line in lines]
    # `metrics.jsonl` has null for numbers that are not finite.
    return [(step, float(value)) for step, value in values if value is not None]
