"""Runs a comparison: pretraining, tuning, cells, report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from filelock import FileLock

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason
from mae_vit.finetuning.comparison.checks import check, check_data
from mae_vit.finetuning.comparison.config import CompareArguments, CompareConfig
from mae_vit.finetuning.comparison.dry_run import describe_plan
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.progress_bar import Bar
from mae_vit.finetuning.comparison.protocol import keep_protocol, read_protocol, recorded_inputs
from mae_vit.finetuning.comparison.report.page import write_report
from mae_vit.finetuning.comparison.runner import Runner, count_slots
from mae_vit.runtime.device import choose_device
from mae_vit.runtime.failures import RunInterrupted, TrainingFailed
from mae_vit.runtime.signals import STOP_SIGNALS, early_signal, handling
from mae_vit.training.engines.precision import Chosen, Precision, choose_precision, fixed


def compare(arguments: CompareArguments) -> Path:
    """Runs all that is missing and writes the report; returns the comparison's folder.

    Raises:
        InputError: if config, data or weights do not fit.
        TrainingFailed: if runs failed; the report covers the others.
        RunInterrupted: if it was stopped, after the runs have saved.
    """
    source = arguments.config
    config = load_config(CompareConfig, source, arguments.overrides, overrides_from=arguments.overrides_from)
    folder = Path(config.run.dir or Path("runs") / config.run.name)
    base = source.resolve().parent if isinstance(source, Path) else Path.cwd()
    protocol = read_protocol(folder)
    plan = ComparisonPlan(config, base, folder, recorded_inputs(protocol))
    if not arguments.report:
        check(plan)
        check_data(plan)
    if arguments.dry_run:
        print(describe_plan(plan, shared_precision(config, protocol["precision"])))
        return folder
    failed = {} if arguments.report else _run(plan)
    with _writing(folder):
        write_report(plan)
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if failed:
        raise TrainingFailed(
            f"{count_of(len(failed), 'run')} failed; {folder / 'report.html'} has the others"
        )
    return folder


def shared_precision(config: CompareConfig, begun: Precision | None) -> Chosen:
    """Returns the precision of runs that name none: the one that the comparison began with, on any machine.

    `begun` is the precision in the comparison's protocol, if any.
    """
    device = choose_device(config.set.get("run.device") or "auto")
    chosen = choose_precision("auto", device)
    if begun is not None:
        chosen = fixed(begun, "auto: the comparison began so", device)
    asked: Literal["auto", "fp32", "bf16", "fp16"] = config.set.get("train.precision") or "auto"
    if asked != "auto":
        # `set` is for fine-tuning: pretraining keeps the comparison's precision.
        why = f"{chosen.why}; fine-tuning is in {asked}, as set"
        chosen = Chosen(chosen.precision, why, choose_precision(asked, device).warning or chosen.warning)
    return chosen


def _run(plan: ComparisonPlan) -> dict[str, str]:
    """Runs all that is missing; returns failed runs: name -> reason."""
    with _writing(plan.folder):
        chosen = shared_precision(plan.config, read_protocol(plan.folder)["precision"])
        keep_protocol(plan, precision=chosen.precision)
    print(f"precision: {chosen}")
    runner, bar = Runner(count_slots(plan.config.parallel), chosen.precision), Bar(plan.runs)
    with _stopping(runner):
        try:
            runner.run(plan.runs, bar)
        finally:
            bar.close()
    if runner.stopped:
        print(f"stopped on {runner.stopped}; the same command resumes", file=sys.stderr)
        raise RunInterrupted(runner.stopped)
    return runner.failed


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Lets one process at a time write into the comparison's folder.

    Raises:
        InputError: if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".report.lock"):
            yield
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error_reason(error)}") from None


@contextmanager
def _stopping(runner: Runner) -> Iterator[None]:
    """Stops the comparison on a signal, once the current runs have saved; a second Ctrl-C does not wait."""

    def stop(number: int, frame: FrameType | None) -> None:
        if runner.stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        runner.stop(signal.Signals(number).name)

    with handling(STOP_SIGNALS, stop):
        if early := early_signal():
            runner.stop(early)
        yield
