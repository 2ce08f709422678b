"""A run's verdict in words: how it ended, whether it learned, whether it was long enough, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def verdict(record: RunRecord) -> list[str]:
    """Returns sentences: the state, what was learned, whether the run was long enough, the next step."""
    if not record.lines:
        return [f"{_state(record)}.", "Nothing was logged yet."]
    collapse = _collapse(record)
    learned, evidence = (False, collapse) if collapse else _learned(record)
    # A collapse is not mended by more of the same.
    falling = None if collapse else _still_falling(record)
    sentences = [f"{_state(record)}.", *evidence]
    if falling is not None:
        sentences.append(
            "It was not long enough: the loss still fell at the end."
            if falling
            else "It was long enough: the loss hardly fell in the last fifth."
        )
    return [*sentences, *_next(record, learned, falling)]


def _state(record: RunRecord) -> str:
    total = record.total_steps
    at = f"step {record.step:,}" + (f" of {total:,}" if total else "")
    states = {
        "done": f"Finished, {count_of(record.step, 'step')}",
        "running": f"Running, {at} when this page was written",
        "interrupted": f"Interrupted after saving at {at} (the same command resumes)",
        "failed": f"Failed at {at}",
    }
    return states.get(record.status or "", f"In an unknown state, {at}")


def _collapse(record: RunRecord) -> list[str]:
    ranks = [value for _, value in values_of(record.lines, "heldout", "rankme")]
    if not ranks or ranks[-1] >= _COLLAPSED:
        return []
    return [
        f"It collapsed: all images have nearly the same features (effective rank {ranks[-1]:.3g}, 1 is the least)."
    ]


def _learned(record: RunRecord) -> tuple[bool | None, list[str]]:
    """Returns whether the encoder learned, None if nobody can tell, and the sentences that say why."""
    by_probe, sentences = _by_probe(record)
    by_loss, sentence = _by_loss(record)
    return (by_loss if by_probe is None else by_probe), [*sentences, sentence]


def _by_probe(record: RunRecord) -> tuple[bool | None, list[str]]:
    """Compares the online probe with its score before the first step."""
    scores = [value for _, value in values_of(record.lines, "probe", _PROBE)]
    if not scores:
        return None, []
    start = record.summary.get("probe_at_start")
    start = start if isinstance(start, dict) else {}
    now = f"A linear layer on its features names {scores[-1]:.1%} of held-out images right"
    first, images = numbers([start.get(_PROBE)]), numbers([start.get("images")])
    if not (first and images):
        return None, [f"{now}; how many it did before training is not known."]
    low, high = interval_of_share(scores[-1], int(images[0]))
    interval = f"95 % interval of {int(images[0]):,} images: {low:.1%} to {high:.1%}"
    against = f"{now} ({interval}), before training {first[0]:.1%}"
    if low > first[0]:
        return True, [f"It learned: {_lower(against)}."]
    if high < first[0]:
        return False, [f"It unlearned: {_lower(against)}."]
    return None, [f"So few images do not show whether it learned: {_lower(against)}."]


def _by_loss(record: RunRecord) -> tuple[bool | None, str]:
    name, values = _losses(record)
    if not values:
        return None, "No finite loss was logged."
    first, last = values[0][1], fmean(value for _, value in values[-max(1, len(values) // 10) :])
    if len(values) == 1:
        return None, f"The {name} is {last:.4g}; one value shows no course."
    if first <= 0:
        return None, f"The {name} went from {first:.4g} to {last:.4g}."
    fall = (first - last) / first
    what = f"the {name} went from {first:.4g} to {last:.4g}"
    if fall >= _LEAST_FALL:
        return True, f"The task was learned: {what}, {fall:.0%} less."
    return False, f"The task was hardly learned: {what}, " + (f"{fall:.1%} less." if fall > 0 else "no less.")


def _still_falling(record: RunRecord) -> bool | None:
    """Whether the end brought much of the fall; None where the run has not ended or too few values tell."""
    _, values = _losses(record)
    if record.status != "done" or len(values) < _FEWEST_VALUES:
        return None
    end = values[-1][0]
    last = [value for step, value in values if step > 0.8 * end]
    before = [value for step, value in values if 0.6 * end < step <= 0.8 * end]
    whole = values[0][1] - fmean(last)
    # Of noise there is no end to wait for.
    if not before or whole < _LEAST_FALL * abs(values[0][1]):
        return None
    return (fmean(before) - fmean(last)) / whole > _STILL_FALLING


def _next(record: RunRecord, learned: bool | None, falling: bool | None) -> list[str]:
    if record.status in ("running", "interrupted"):
        return []
    if record.status == "failed":
        return [
            "Next: read the end of its log, and the incidents below if there are any; the same command resumes."
        ]
    if learned is False and not falling:
        return [
            f"Next: look at what it trains on (`mae-vit replay {record.path} --step 1`), then try other learning "
            "rates: a tenth of this one, and three times it."
        ]
    if falling:
        train = record.section("train")
        key = next((key for key in ("epochs", "steps", "samples") if numbers([train.get(key)])), "epochs")
        value = numbers([train.get(key)])
        longer = f"train.{key}={2 * value[0]:.15g}" if value else "a larger train.epochs"
        return [f"Next: train longer, in a folder of its own ({longer} run.name=longer)."]
    run = quote(str(record.path))
    if learned is None:
        return [
            f"Next: compare it with random weights on labeled images (`mae-vit finetune --ckpt {run} "
            "finetune.mode=knn`)."
        ]
    return [f"Next: use it (`mae-vit finetune --ckpt {run}`), look into it (`mae-vit inspect --ckpt {run}`)."]


def _losses(record: RunRecord) -> tuple[str, Sequence[tuple[int, float]]]:
    """The loss of held-out images, which noise and over-fitting blur least; else that of training."""
    held_out = values_of(record.lines, "heldout", "loss")
    if len(held_out) >= _FEWEST_VALUES:
        return "held-out loss", held_out
    return "training loss", [
        (line["step"], value) for line in record.lines for value in numbers([line.get("loss")])
    ]


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def held_out_names(lines: Iterable[Mapping[str, Any]], group: str = "heldout") -> list[str]:
    """Names the metrics of a group that any line has."""
    return list(dict.fromkeys(name for line in lines for name in _group(line, group)))


def values_of(lines: Iterable[Mapping[str, Any]], group: str, name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of a metric of a group, where it is a finite number."""
    return [(line["step"], value) for line in lines for value in numbers([_group(line, group).get(name)])]


def numbers(values: Iterable[Any]) -> list[float]:
    """Returns the finite numbers of `values`."""
    return [
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]


def _group(line: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    inner = line.get(group)
    return inner if isinstance(inner, dict) else {}
