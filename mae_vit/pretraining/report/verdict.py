"""One sentence on a run: how it ended, and whether its curves are normal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, nearest
from mae_vit.pretraining.reference_curves import (
    FOLDER,
    Departure,
    Reference,
    deviations,
    nearest_reference,
    read_references,
    recipe_of,
)
from mae_vit.pretraining.report.run_record import RunRecord

# What is learned, by which network and from which views.
_TASK = ("model.", "objective.", "data.")
# The metric of held-out images that a sentence has room for: the first of these, else the first there is.
_PREFERRED = ("psnr_gain_db", "top1", "loss")
# Features of a lower effective rank are nearly the same for all images. A fall alone is no warning: in our runs of MAE
# the rank falls to a third while the probes improve (docs/results/rankme.json).
_COLLAPSED = 2.0


@dataclass(frozen=True)
class Comparison:
    """A run against the reference curves of its recipe.

    Attributes:
        reference: the curves.
        departures: where the run leaves the band.
        compared: number of compared places, at least 1.
    """

    reference: Reference
    departures: Sequence[Departure]
    compared: int


def choose_reference(
    config: Mapping[str, Any], run: object, preset: str | None = None
) -> tuple[Reference, list[str]]:
    """Chooses the reference curves that a run is compared with, and lists how its recipe differs.

    Args:
        config: of the run, resolved.
        run: its name, for messages.
        preset: the name of the curves; None for those of the nearest recipe.

    Raises:
        InputError: if there are none of such a run.
    """
    references = read_references()
    if not references:
        raise InputError(f"there are no reference curves at {FOLDER}: this command needs the repository")
    if preset is not None:
        names = [reference.name for reference in references]
        references = [reference for reference in references if reference.name == preset]
        if not references:
            raise InputError(f"--preset {preset}: {nearest(preset, names)}")
    chosen = nearest_reference(recipe_of(config), references)
    assert chosen is not None
    # Another rate shows in the curve what it does; another task has another curve.
    others = [text for text in chosen[1] if text.startswith(_TASK)]
    if preset is None and others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InputError(
            f"{run}: there are no measured curves of such a run: {chosen[0].name} comes nearest, and differs in "
            f"{others[0]}{more}; --preset NAME compares a run of its length, {chosen[0].total_steps:,} steps, all "
            "the same"
        )
    return chosen


def compare(record: RunRecord) -> Comparison | None:
    """Compares a run with the curves of exactly its recipe and length.

    Returns:
        None where none are measured, or nothing is in common: of another recipe a curve may leave the band and
        be normal, and `mae-vit curve` shows it.
    """
    try:
        reference, differing = choose_reference(record.config, record.path)
        if differing or record.total_steps not in (None, reference.total_steps):
            return None
        departures, compared = deviations(reference, record.lines)
    except (InputError, KeyError, TypeError, AttributeError, ValueError):  # the config or a line is torn
        return None
    return Comparison(reference, departures, compared) if compared else None


def verdict(record: RunRecord, comparison: Comparison | None) -> str:
    """Returns one sentence: the state of the run, then its judgement, or plain facts without a reference."""
    return f"{_state(record)}: {_judgement(record, comparison)}."


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


def _judgement(record: RunRecord, comparison: Comparison | None) -> str:
    if not record.lines:
        return "nothing was logged yet"
    if comparison is None:
        return "; ".join(_facts(record))
    reference = comparison.reference
    band = f"the band of {reference.name} ({count_of(len(reference.seeds), 'seed')})"
    if comparison.departures:
        first = comparison.departures[0]
        sentence = (
            f"not normal, {first.curve} {first.value:.4g} at step {first.step:,} is outside of {first.low:.4g} to "
            f"{first.high:.4g}, {band}"
        )
    else:
        last = record.lines[-1]["step"]
        places = "the one compared place" if comparison.compared == 1 else f"all {comparison.compared} places"
        sentence = f"normal, within {band} at {places} up to step {last:,}"
    return sentence


def _facts(record: RunRecord) -> list[str]:
    """First and last values: without a reference nobody can say more."""
    facts = []
    if losses := numbers(line.get("loss") for line in record.lines):
        facts.append(f"the training loss {_went(losses)}")
    else:
        facts.append("no finite loss was logged")
    names = held_out_names(record.lines)
    name = next((name for name in _PREFERRED if name in names), next(iter(names), None))
    if name is not None and (values := values_of(record.lines, "heldout", name)):
        facts.append(f"{name} of held-out images {_went([value for _, value in values])}")
    elif name is None:
        done = record.status == "done"
        facts.append("no images were held out" if done else "no held-out images were evaluated so far")
    if values := values_of(record.lines, "probe", "few_shot_top1"):
        facts.append(f"the probe's few-shot top-1 {_went([value for _, value in values])}")
    if ranks := [value for _, value in values_of(record.lines, "heldout", "rankme")]:
        collapsed = ranks[-1] < _COLLAPSED
        facts.append(f"rankme {_went(ranks)}" + (" (near 1: a collapse)" if collapsed else ""))
    return facts


def _went(values: Sequence[float]) -> str:
    first, last = values[0], values[-1]
    if len(values) == 1:
        return f"is {first:.4g}"
    way = "fell" if last < first else "rose" if last > first else "stayed"
    return f"stayed at {last:.4g}" if way == "stayed" else f"{way} from {first:.4g} to {last:.4g}"


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
