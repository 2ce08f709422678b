"""`protocol.json`: the plans of a comparison, with the number of runs that had been tested at each.

Choices made after test results bias them. So the comparison keeps each of its plans, and the report lists every
change made after the first run had read the test split.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from mae_vit.comparison.inputs import sha1
from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json, write_json
from mae_vit.core.messages import count_of

PROTOCOL = "protocol.json"
# Keys that change no result.
_FREE = ("run", "parallel")
# Most changed keys in a message.
_MOST_KEYS = 3
# A run folder has one of these once it has read the test split; the first only in modes that train.
_AFTER_THE_TEST = ("test_reads.json", "results.json")


def read_protocol(folder: Path) -> dict[str, Any]:
    """Reads the protocol of a comparison's folder; returns one without plans if there is none.

    Raises:
        InputError: if the folder has the layout of earlier versions, which named runs differently.
    """
    path = folder / PROTOCOL
    protocol: dict[str, Any] = read_json(path) if path.exists() else {"precision": None, "plans": []}
    if "plans" not in protocol:
        raise InputError(
            f"{folder} has a comparison of an earlier version, whose runs cannot be reused; give another run.name, "
            "or delete the folder"
        )
    return protocol


def recorded_inputs(protocol: dict[str, Any]) -> dict[str, Any]:
    """Returns the digests of the inputs of the last plan."""
    inputs: dict[str, Any] = protocol["plans"][-1]["inputs"] if protocol["plans"] else {}
    return inputs


def keep_protocol(plan: ComparisonPlan, *, precision: str) -> None:
    """Adds the plan if it has changed, with the number of runs that had read the test split by then.

    The comparison's folder must exist. `precision` is what `train.precision=auto` means in it.
    """
    plans = read_protocol(plan.folder)["plans"]
    settings = _settings(plan)
    identity = sha1([settings, {run.name: run.id for run in plan.runs}])
    if not plans or plans[-1]["plan"] != identity:
        plans.append(
            {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "plan": identity,
                "tested_runs": len(tested_runs(plan.folder)),
                "settings": settings,
                "inputs": plan.digests,
            }
        )
    write_json(plan.folder / PROTOCOL, {"precision": precision, "plans": plans})


def _settings(plan: ComparisonPlan) -> dict[str, Any]:
    return plan.config.model_dump(mode="json", exclude=set(_FREE))


def tested_runs(folder: Path) -> set[Path]:
    """Returns the run folders that have read the test split, including those of earlier plans."""
    return {path.parent for name in _AFTER_THE_TEST for path in folder.glob(f"*/*/{name}")}


def describe_changes(plan: ComparisonPlan) -> list[str]:
    """Returns a sentence for each plan change after test images were read, and for runs of earlier plans."""
    changes = []
    for before, after in pairwise(read_protocol(plan.folder)["plans"]):
        tested, changed = after["tested_runs"], ", ".join(_changed(before, after))
        # Another version of the library may write the same plan in other words.
        if tested and changed:
            when = f"{after['time']}, {count_of(tested, 'run')}"
            changes.append(f"The protocol was changed after test results were read ({when}): {changed}.")
    earlier = tested_runs(plan.folder) - {cell.run.folder for cell in plan.cells}
    if earlier:
        rows = ", ".join(sorted({path.parent.name for path in earlier}))
        runs = count_of(len(earlier), "run")
        changes.append(f"{runs} with earlier settings also read test images ({rows}).")
    return changes


def describe_unfinished(plan: ComparisonPlan) -> str:
    """Says that no cell of the plan is done, and which keys differ from those of the last plan that ran."""
    plans, changed = read_protocol(plan.folder)["plans"], list[str]()
    if plans and tested_runs(plan.folder):
        now = {"settings": _settings(plan), "inputs": plan.digests}
        changed = _changed(plans[-1], now)[:_MOST_KEYS]
    if not changed:
        unfinished = f"no fine-tuning run with these settings is finished in {plan.folder}"
        return f"{unfinished}; run the same command without --report"
    others = f"{plan.folder} has runs with other settings ({', '.join(changed)})"
    return f"no fine-tuning run with these settings is finished: {others}; give the same again"


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the dotted keys and the inputs in which two plans of the protocol differ."""
    inputs = [
        _describe_input(name, was, now)
        for name, now in after["inputs"].items()
        if (was := before["inputs"].get(name, now)) != now
    ]
    settings = [*_differences(before["settings"], after["settings"])]
    # A folder that was moved: its splits are the same.
    if _data(before) == _data(after):
        settings = [key for key in settings if not f".{key}".endswith(".data.path")]
    return [*settings, *inputs]


def _data(plan: dict[str, Any]) -> list[Any]:
    return [value for name, value in plan["inputs"].items() if name.startswith("data ")]


def _describe_input(name: str, was: Any, now: Any) -> str:
    """Names an input that has changed; data with the splits, or the meaning of numbers, that are others."""
    kind, _, path = name.partition(" ")
    if kind != "data":
        return name
    before, after = was or {}, now or {}
    changed = [part for part in {**before, **after} if before.get(part) != after.get(part)]
    return f"data.path: {path} changed ({', '.join(changed)})"


def _differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yields the dotted keys of values that differ; list items are matched by name."""
    before, now = _by_name(before), _by_name(now)
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{place}.{key}" if place else key)
    elif before != now:
        yield place


def _by_name(values: Any) -> Any:
    if isinstance(values, list) and all(isinstance(value, dict) and "name" in value for value in values):
        return {value["name"]: value for value in values}
    return values
