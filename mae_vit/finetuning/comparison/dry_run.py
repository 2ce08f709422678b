"""Describes what a comparison will run (`--dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from mae_vit.core.messages import count_of
from mae_vit.finetuning.comparison.config import EntrySection
from mae_vit.finetuning.comparison.plan import Cell, ComparisonPlan
from mae_vit.finetuning.comparison.report.rows import describe_labels, row_title
from mae_vit.finetuning.comparison.runner import count_slots
from mae_vit.finetuning.comparison.spec import RunSpec
from mae_vit.training.engines.precision import Chosen


def describe_plan(plan: ComparisonPlan, precision: Chosen) -> str:
    """Returns the plan as a tree: pretraining runs, below each the rows that use it, below each row its runs.

    `precision` is that of runs whose config names none.
    """
    slots = count_slots(plan.config.parallel)
    lines = [
        f"comparison  {plan.folder}, {count_of(slots, 'run')} at a time",
        f"precision   {precision}",
        f"runs        {_progress(plan.runs)}",
    ]
    for name, run in plan.pretraining.items():
        lines.append(f"{run.name}: {_progress([run])}, {run.run_folder}")
        for entry in plan.config.entries:
            if entry.start == name:
                lines += _row(plan, entry, indent="  ")
    for entry in plan.config.entries:
        if entry.start not in plan.pretraining:
            lines += _row(plan, entry)
    if left := _seconds_left(plan.runs):
        lines.append(f"left        about {timedelta(seconds=round(left / slots))}, by the runs that are done")
    return "\n".join([*lines, "all checks passed; nothing was run"])


def _row(plan: ComparisonPlan, entry: EntrySection, indent: str = "") -> list[str]:
    lines = [f"{indent}{row_title(entry)}"]
    groups: dict[tuple[object, str], list[Cell]] = {}
    for cell in plan.cells:
        if cell.entry is entry:
            groups.setdefault((cell.labels, cell.mode), []).append(cell)
    for (_, mode), cells in groups.items():
        choice, seeds = cells[0].run.choice, ", ".join(str(cell.seed) for cell in cells)
        if choice and choice.runs and entry.compute_of is None:
            tuning = [run for runs in choice.runs for run in runs]
            lines.append(f"{indent}  tune {len(choice.runs)} settings: {_progress(tuning)}")
        after = f", as long as {entry.compute_of}" if entry.compute_of else ""
        runs = [cell.run for cell in cells]
        lines.append(
            f"{indent}  {describe_labels(cells[0].labels)}, {mode}{after}, seeds {seeds}: {_progress(runs)}"
        )
    return lines


def _progress(runs: Sequence[RunSpec]) -> str:
    return f"{count_of(len(runs), 'run')}, {sum(run.is_done() for run in runs)} done"


def _seconds_left(runs: Sequence[RunSpec]) -> float | None:
    """Estimates the seconds left from each row's mean over finished runs; None if a row has no finished run."""
    done: dict[Path, list[float]] = {}
    left = [run.folder.parent for run in runs if not run.is_done()]
    for run in runs:
        if run.is_done():
            done.setdefault(run.folder.parent, []).append(run.summary.get("wall_s", 0.0))
    return sum(fmean(done[row]) for row in left) if left and done.keys() >= set(left) else None
