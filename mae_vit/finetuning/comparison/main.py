"""Runs a comparison: pretraining, tuning, cells, report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from filelock import FileLock

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, error_reason
from mae_vit.finetuning.comparison.config import TUNED_BY, CompareArguments, CompareConfig
from mae_vit.finetuning.comparison.jobs import Job, unfinished
from mae_vit.finetuning.comparison.matrix.cell import Cell
from mae_vit.finetuning.comparison.matrix.matrix import Matrix
from mae_vit.finetuning.comparison.plan_text import describe_plan
from mae_vit.finetuning.comparison.progress_bar import Bar
from mae_vit.finetuning.comparison.protocol import begun_precision, keep_protocol
from mae_vit.finetuning.comparison.report.encoder_views import write_inspection
from mae_vit.finetuning.comparison.report.page import write_page, write_text
from mae_vit.finetuning.comparison.report.predictions import PREDICTIONS, pack_predictions
from mae_vit.finetuning.comparison.report.rows import Row, read_rows, table
from mae_vit.finetuning.comparison.report.segmentation import MASKS, overlays
from mae_vit.finetuning.comparison.report.summary import lines_of, notes_of, terminal_table
from mae_vit.finetuning.comparison.runner import Runner, slots_of
from mae_vit.runtime.device import choose_device
from mae_vit.runtime.failures import RunInterrupted, TrainingFailed
from mae_vit.runtime.signals import STOP_SIGNALS, early_signal, handling
from mae_vit.training.engines.precision import Chosen, Precision, choose_precision, fixed
from mae_vit.training.outputs.trackers.tensorboard import write_hparams

# Of nothing else: it is written anew.
_HPARAMS = "hparams"


def compare(arguments: CompareArguments) -> Path:
    """Runs all that is missing and writes the report; returns the comparison's folder.

    Raises:
        InputError: for whatever does not fit, or if a folder holds another run.
        TrainingFailed: if runs failed; the report has the others.
        RunInterrupted: if it was stopped, after the runs have saved.
    """
    source = arguments.config
    config = load_config(CompareConfig, source, arguments.overrides, overrides_from=arguments.overrides_from)
    folder = Path(config.run.dir or Path("runs") / config.run.name)
    base = source.resolve().parent if isinstance(source, Path) else Path.cwd()
    matrix = Matrix(config, base, folder)
    if not arguments.report:
        matrix.check()
        matrix.check_data()
    if arguments.dry_run:
        print(describe_plan(matrix, folder, _known_cells(matrix), choose_precision_of(config, folder)))
        return folder
    failed = {} if arguments.report else _run_all(matrix, _keep_protocol(matrix, folder))
    _report(matrix, folder, failed)
    if failed:
        raise TrainingFailed(
            f"{count_of(len(failed), 'run')} failed; {folder / 'report.html'} has the others"
        )
    return folder


def choose_precision_of(config: CompareConfig, folder: Path) -> Chosen:
    """Returns the precision of all runs that name none: that in which the comparison began, on any machine."""
    device = choose_device(config.set.get("run.device") or "auto")
    begun = begun_precision(folder)
    chosen = choose_precision("auto", device)
    if begun is not None:
        chosen = fixed(begun, "auto: the comparison began so", device)
    asked: Literal["auto", "fp32", "bf16", "fp16"] = config.set.get("train.precision") or "auto"
    if asked != "auto":
        # Pretraining does not take what is set for fine-tuning.
        why = f"{chosen.why}; fine-tuning is in {asked}, as set"
        chosen = Chosen(chosen.precision, why, choose_precision(asked, device).warning or chosen.warning)
    return chosen


def _keep_protocol(matrix: Matrix, folder: Path) -> Precision:
    cells = _known_cells(matrix)
    # Refuses folders of other runs before anything is noted.
    unfinished([*matrix.pretraining.values(), *matrix.tuning(), *(cell.job for cell in cells)])
    tested = sum("test_top1" in cell.job.summary for cell in cells)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".report.lock"):
            chosen = choose_precision_of(matrix.config, folder)
            keep_protocol(folder, matrix.config, precision=chosen.precision, tested=tested)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error_reason(error)}") from None
    print(f"precision: {chosen}")
    return chosen.precision


def _run_all(matrix: Matrix, precision: Precision) -> dict[str, str]:
    """Runs all that is missing; returns why runs failed, by their names."""
    runner = Runner(slots_of(matrix.config.parallel), precision)
    pretraining, tuning = list(matrix.pretraining.values()), matrix.tuning()
    # Cells that wait for no tuning begin as soon as a slot is free and their weights are there.
    early = [cell.job for cell in matrix.cells(compute_of=False) if _is_ready(matrix, cell)]
    bar = Bar([*pretraining, *tuning, *early], more=matrix.count_cells() - len(early))
    with _stopping(runner):
        try:
            runner.run([*pretraining, *tuning, *early], bar)
            for compute_of in (False, True):
                _run_cells(matrix, runner, bar, compute_of=compute_of, known=early)
        finally:
            bar.close()
    if runner.stopped:
        print(f"stopped on {runner.stopped}; the same command resumes", file=sys.stderr)
        raise RunInterrupted(runner.stopped)
    return runner.failed


def _run_cells(matrix: Matrix, runner: Runner, bar: Bar, *, compute_of: bool, known: list[Job]) -> None:
    """Runs the cells that are not among those of before, `known`."""
    if runner.stopped:
        return
    try:
        cells = [cell for cell in matrix.cells(compute_of=compute_of) if cell.job not in known]
    except InputError as error:
        if not runner.failed:
            raise
        runner.failed["cells of equal compute"] = str(error)
        return
    bar.add(cell.job for cell in cells)
    ready = []
    for cell in cells:
        if _is_ready(matrix, cell):
            ready.append(cell.job)
        else:
            runner.failed[cell.job.name] = "not all settings that it is to choose from were tried"
    runner.run(ready, bar)


def _is_ready(matrix: Matrix, cell: Cell) -> bool:
    """Whether a cell's settings are chosen: it would be another cell once the rest of its tuning is there."""
    return cell.mode not in TUNED_BY or matrix.is_tuned(cell.entry, cell.labels)


def _report(matrix: Matrix, folder: Path, failed: dict[str, str]) -> None:
    """Writes the table and the pages, one process at a time.

    Raises:
        InputError: if a folder holds another run, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".report.lock"):
            _write_report(matrix, folder, failed)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error_reason(error)}") from None


def _write_report(matrix: Matrix, folder: Path, failed: dict[str, str]) -> None:
    cells = _known_cells(matrix)
    rows = read_rows(matrix, cells)
    missing = [cell.job.name for cell in cells if not cell.job.is_done()]
    known = {(cell.entry.name, cell.labels, cell.mode) for cell in cells}
    missing += [
        f"{entry.name}, {labels} labels, {mode}"
        for entry, labels, mode in matrix.rows()
        if (entry.name, labels, mode) not in known
    ]
    inspected = _inspect(matrix, rows, folder)
    if masks := overlays(matrix.config, rows):
        write_atomically(folder / MASKS, masks)
    for name, content in (
        ("results.csv", table(rows).encode()),
        (PREDICTIONS, pack_predictions(rows)),
        ("report.md", write_text(matrix, rows, missing).encode()),
        ("report.html", write_page(matrix, rows, missing, inspected=inspected is not None).encode()),
    ):
        write_atomically(folder / name, content)
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if rows:
        lines = lines_of(matrix.config, rows)
        print("\n".join(["", terminal_table(lines), *(f"  {note}" for note in notes_of(lines)), ""]))
    print(f"{len(rows)} of {count_of(matrix.count_cells(), 'cell')} done")
    print(f"  report    {folder / 'report.html'} (open in a browser), {folder / 'report.md'}")
    print(f"  table     {folder / 'results.csv'}, predictions of every cell: {folder / PREDICTIONS}")
    if inspected:
        print(f"  inside    {inspected}")
    if rows:
        write_hparams(folder / _HPARAMS, _hparams(rows))
        print(f"  watch     tensorboard --logdir {folder / _HPARAMS}")


def _inspect(matrix: Matrix, rows: Sequence[Row], folder: Path) -> Path | None:
    """Adds the inspection of the best; without the data the report has none."""
    try:
        return write_inspection(matrix.config, rows, folder)
    except InputError as error:
        print(f"note: nothing is inspected: {error}", file=sys.stderr)
    return None


def _hparams(rows: Sequence[Row]) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """Returns settings and results of cells, by a readable name."""
    facts = ("entry", "start", "start_origin", "model", "labels_per_class", "mode", "seed", "settings")
    scores = [f"{part}_{metric}" for metric in ("top1", "miou") for part in ("test", "val", "train")]
    scores += ["finetune_flops", "pretrain_flops"]
    return {
        f"{row.cell.entry.name}, {row.cell.labels} labels, {row.cell.mode}, seed {row.cell.seed}": (
            {name: row.values[name] for name in facts if row.values[name] is not None},
            {name: float(row.values[name]) for name in scores if row.values.get(name) is not None},
        )
        for row in rows
    }


def _known_cells(matrix: Matrix) -> list[Cell]:
    """Returns all known cells in the table's order; some depend on the results of others."""
    cells = matrix.cells(compute_of=False)
    with suppress(InputError):
        cells += matrix.cells(compute_of=True)
    order = {entry.name: place for place, entry in enumerate(matrix.config.entries)}
    return sorted(cells, key=lambda cell: order[cell.entry.name])


@contextmanager
def _stopping(runner: Runner) -> Iterator[None]:
    """A signal ends the comparison after the current runs have saved; a second Ctrl-C does not wait."""

    def stop(number: int, frame: FrameType | None) -> None:
        if runner.stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        runner.stop(signal.Signals(number).name)

    with handling(STOP_SIGNALS, stop):
        if early := early_signal():
            runner.stop(early)
        yield
