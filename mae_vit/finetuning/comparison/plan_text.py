"""Says what a comparison is going to run: `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.finetuning.comparison.jobs import Job, unfinished
from mae_vit.finetuning.comparison.matrix.cell import Cell
from mae_vit.finetuning.comparison.matrix.matrix import Matrix
from mae_vit.finetuning.comparison.report.rows import describe_labels, title_of
from mae_vit.finetuning.comparison.runner import slots_of
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.outputs.run_folder import RunFolder


def describe_plan(matrix: Matrix, folder: Path, cells: Iterable[Cell], precision: Chosen) -> str:
    """Returns the plan: what the comparison runs, what is done of it, and why it would stop in folders of other runs.

    Args:
        matrix: of the comparison.
        folder: of the comparison.
        cells: that are known so far.
        precision: of the runs that name none.
    """
    jobs = {"pretraining": list(matrix.pretraining.values()), "tuning": matrix.tuning()}
    lines = [f"comparison  {folder}, {count_of(slots_of(matrix.config.parallel), 'run')} at a time"]
    lines.append(f"precision   {precision}")
    for what, several in jobs.items():
        done = sum(map(_is_done, several))
        lines.append(f"{what:<12}{count_of(len(several), 'run')}, {done} done")
        lines += [f"  {job.name}{_place(job)}" for job in several if what == "pretraining"]
    lines.append(f"{'cells':<12}{count_of(matrix.count_cells(), 'run')}")
    for entry, labels, mode in matrix.rows():
        seeds = matrix.seeds_of(entry, labels, mode)
        lines.append(
            f"  {title_of(entry)}, {describe_labels(labels)}, {mode}, seeds {', '.join(map(str, seeds))}"
        )
    try:
        unfinished([*jobs["pretraining"], *jobs["tuning"], *(cell.job for cell in cells)])
    except InputError as error:
        lines += [
            f"warning: the comparison itself will stop: {error}",
            "all other checks passed; nothing was run",
        ]
    else:
        lines.append("all checks passed; nothing was run")
    return "\n".join(lines)


def _is_done(job: Job) -> bool:
    try:
        # Runs elsewhere are always called, and say themselves that they are done.
        return job.is_done() or (job.notes is not None and RunFolder(job.folder).read_status() == "done")
    except InputError:
        return False


def _place(job: Job) -> str:
    """Names the folder of a run outside the comparison's, which other comparisons may share."""
    return f" in {job.folder}" if job.notes is not None else ""
