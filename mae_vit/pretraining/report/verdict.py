"""Judges a run: how it ended, whether it learned, whether it was long enough, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from statistics import fmean
from typing import Any, NamedTuple

from mae_vit.core.messages import count_of
from mae_vit.evaluation.metrics import interval_of_share
from mae_vit.pretraining.report.run_record import RunRecord, describe_score

# Below this effective rank, features are nearly equal for all images. A fall alone is no warning: in our MAE runs the
# rank falls to a third while the probes improve (docs/results/rankme.json).
_COLLAPSED = 2.0
# A run whose loss fell by a smaller fraction did not learn. In our runs that learn it falls by 20 % or more.
_LEAST_FALL = 0.05
# A loss is still falling if the last fifth of the run brought a larger fraction of its whole fall. Our runs of full
# length with a cosine schedule have about 3 %, a straight line has 22 %.
_STILL_FALLING = 0.06
# On 8x8 digits more steps (of 128 images) improve fine-tuning little; on photographs they do (docs/choosing.md).
FEW_STEPS = 1_000
# With fewer values a trend cannot be told from noise.
_FEWEST_VALUES = 5
_PROBE = "few_shot_top1"
Points = Sequence[tuple[int, float]]


class Verdict(NamedTuple):
    """A verdict in words; code stands between backticks.

    Attributes:
        answer: one sentence.
        reasons: sentences with the numbers behind it.
        next: what to do next; empty while the run is not over.
    """

    answer: str
    reasons: list[str]
    next: str

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.answer, *self.reasons, self.next]))


def verdict(record: RunRecord) -> Verdict:
    """Judges a run by its online probe, else by its loss; of a fine-tuning run it tells the score."""
    if "finetune" in record.config:
        return _of_labels(record)
    if not record.lines:
        return Verdict(f"{_state(record)}: nothing was logged yet.", [], "")
    held_out, training = metric_values(record.lines, "loss", "heldout"), metric_values(record.lines, "loss")
    # The held-out loss suffers least from noise and over-fitting.
    name, points = ("held-out", held_out) if len(held_out) >= _FEWEST_VALUES else ("training", training)
    ranks = metric_values(record.lines, "rankme", "heldout")
    # Features of random weights may be as near to each other.
    if ranks and ranks[-1][1] < _COLLAPSED and record.step >= FEW_STEPS // 10:
        reason = (
            f"All images have nearly the same features: effective rank {ranks[-1][1]:.3g}, 1 is the least."
        )
        # A longer run would not help.
        return Verdict(f"{_state(record)}: it collapsed.", [reason], _next(record, False, None))
    learned, found, reasons = _by_probe(record)
    by_loss = _fall(points)
    if by_loss is not None:
        fell = "fell" if by_loss >= _LEAST_FALL else "hardly fell" if by_loss >= 0 else "rose"
        change = f"{points[0][1]:.4g} to {_last(points):.4g}, {abs(by_loss):.1%} {'less' if by_loss >= 0 else 'more'}"
        reasons.append(f"The {name} loss {fell} from {change}.")
        if not found:
            learned, found = by_loss >= _LEAST_FALL, f"its loss {fell}"
    falling = _still_falling(points) if record.summary.get("status") == "done" else None
    if falling is not None:
        reasons.append(f"In the last fifth of the steps it {'still' if falling else 'hardly'} fell.")
        # A flat loss alone is not enough: a schedule ends flat, however short it is.
        if found and (learned or falling):
            found += (
                f"{', but' if learned and falling else ', and'} the run was {'not ' * falling}long enough"
            )
    answer = f"{_state(record)}: {found}." if found else f"{_state(record)}."
    return Verdict(answer, reasons, _next(record, learned, falling))


def _of_labels(record: RunRecord) -> Verdict:
    summary, run = record.summary, quote(str(record.path))
    answer = ": ".join(filter(None, [_state(record), describe_score(summary)]))
    reasons = [str(summary["reading"]).capitalize()] if "reading" in summary else []
    if interval := summary.get("interval_95"):
        reasons.insert(0, "95 % interval, with other images: {:.1%} to {:.1%}.".format(*interval))
    usable = summary.get("status") == "done" and summary.get("mode") == "finetune"
    return Verdict(f"{answer}.", reasons, f"Next: use it (`mae-vit predict {run} IMAGES`)." if usable else "")


def _state(record: RunRecord) -> str:
    total = record.summary.get("total_steps")
    at = f"step {record.step:,}" + (f" of {total:,}" if total else "")
    states = {
        "done": "Finished" + f", {count_of(record.step, 'step')}" * bool(record.step),
        "running": f"Running, {at} when this page was written"
        if record.trains
        else f"Killed, it seems, at {at} (no process holds its lock; the same command resumes)",
        "interrupted": f"Interrupted after saving at {at} (the same command resumes)",
        "failed": f"Failed at {at}",
    }
    return states.get(record.summary.get("status", ""), f"In an unknown state, {at}")


def _by_probe(record: RunRecord) -> tuple[bool | None, str, list[str]]:
    """Compares the online probe with its score before training.

    Returns whether the features improved, None if the difference is not significant; words for it; sentences.
    """
    scores = metric_values(record.lines, _PROBE, "probe")
    if not scores:
        return None, "", []
    score = scores[-1][1]
    now = f"A linear layer on its features classifies {score:.1%} of held-out images correctly"
    start = record.summary.get("probe_at_start")
    if not start:
        return None, "", [f"{now}; its score before training is not known."]
    first, images = start[_PROBE], start["images"]
    (low, high), (least, most) = (interval_of_share(share, images) for share in (score, first))
    learned = True if low > most else False if high < least else None
    words = {True: "improved", False: "got worse", None: "are not clearly better than before training"}
    interval = f"95 % interval of {images:,} images: {low:.1%} to {high:.1%}"
    return learned, f"its features {words[learned]}", [f"{now} ({interval}), before training {first:.1%}."]


def _last(points: Points) -> float:
    return fmean(value for _, value in points[-max(1, len(points) // 10) :])


def _fall(points: Points) -> float | None:
    """Returns the fraction of its first value by which a loss fell; None if that is undefined."""
    if len(points) < 2 or points[0][1] <= 0:
        return None
    return 1 - _last(points) / points[0][1]


def _still_falling(points: Points) -> bool | None:
    """Returns whether the last fifth brought much of the fall; None with too few values or hardly any fall."""
    if len(points) < _FEWEST_VALUES:
        return None
    end, first = points[-1][0], points[0][1]
    last = fmean(value for step, value in points if step > 0.8 * end)
    before = [value for step, value in points if 0.6 * end < step <= 0.8 * end]
    # Hardly any fall: the values are noise.
    if not before or first - last <= _LEAST_FALL * abs(first):
        return None
    return (fmean(before) - last) / (first - last) > _STILL_FALLING


def _next(record: RunRecord, learned: bool | None, falling: bool | None) -> str:
    run, status = quote(str(record.path)), record.summary.get("status")
    length = next((key for key in ("steps", "samples") if record.section("train").get(key)), "epochs")
    if status in ("running", "interrupted"):
        return ""
    if status == "failed":
        todo = "read the end of its log, and the incidents below if there are any; the same command resumes"
    elif falling:
        todo = f"train longer, in a folder of its own (a larger train.{length}, and run.name=longer)"
    elif learned is False:
        todo = f"look at what it trains on (`mae-vit replay {run} --step 1`), then try other learning rates"
    elif learned is None and record.step < FEW_STEPS:
        todo = f"train longer, {count_of(record.step, 'step')} are few (a larger train.{length}, and run.name=longer)"
    elif learned is None:
        todo = (
            "see whether nearest neighbors are right more often by its features than by those of random weights "
            f"(`mae-vit finetune --ckpt {run} finetune.mode=knn`)"
        )
    else:
        todo = f"look into it (`mae-vit inspect {run}`); with labels, fine-tune it (`mae-vit finetune --ckpt {run}`)"
    return f"Next: {todo}."


def metric_values(
    lines: Sequence[Mapping[str, Any]], name: str, group: str | None = None
) -> list[tuple[int, float]]:
    """Returns (step, value) pairs of a metric, optionally in `group`, where the value is finite."""
    values = [(line["step"], (line if group is None else line.get(group, {})).get(name)) for line in lines]
    # `metrics.jsonl` has null for numbers that are not finite.
    return [(step, float(value)) for step, value in values if value is not None]
