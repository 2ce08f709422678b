"""Says what a comparison is going to run: `--dry-run`."""

from __future__ import annotations

from pathlib import Path

from mae_vit.core.messages import count_of
from mae_vit.finetuning.comparison.matrix import Matrix
from mae_vit.finetuning.comparison.report.rows import title_of
from mae_vit.finetuning.comparison.runner import slots_of


def describe_plan(matrix: Matrix, folder: Path) -> str:
    """Returns the plan: what the comparison runs, and what is done of it."""
    jobs = {"pretraining": list(matrix.pretraining.values()), "tuning": matrix.tuning()}
    lines = [f"comparison  {folder}, {count_of(slots_of(matrix.config.parallel), 'run')} at a time"]
    for what, several in jobs.items():
        done = sum(job.is_done() for job in several)
        lines.append(f"{what:<12}{count_of(len(several), 'run')}, {done} done")
        lines += [f"  {job.name}" for job in several if what == "pretraining"]
    lines.append(f"{'cells':<12}{count_of(matrix.count_cells(), 'run')}")
    for entry, labels, mode in matrix.rows():
        seeds = matrix.seeds_of(entry, labels, mode)
        lines.append(
            f"  {title_of(entry)}, {labels} labels for each class, {mode}, seeds {', '.join(map(str, seeds))}"
        )
    return "\n".join([*lines, "all checks passed; nothing was run"])
