"""The command line of comparisons, checked without importing torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mae_vit.comparison.config import CompareConfig
from mae_vit.config.command_line import (
    Arguments,
    OneLineParser,
    add_config,
    add_local_rank,
    list_sections,
    take_config,
)
from mae_vit.config.load import load_config
from mae_vit.runtime.failures import run_to_exit_code
from mae_vit.runtime.imports import slow_imports

_KEYS_OF_RUNS = """
keys of the runs:
  set.KEY                every fine-tuning run (set.train.epochs=10)
  pretrain.NAME.set.KEY  a pretraining run (pretrain.MAE.set.train.epochs=10)
  pretrain.NAME.dir      its folder, which comparisons may share; null: in this comparison's folder
"""
_EXAMPLES = """  mae-vit compare compare_demo
  mae-vit compare compare_photos data.path=data/photos
  mae-vit compare compare_demo run.name=quick 'seeds=[0]' \\
      set.train.epochs=2 set.train.warmup_epochs=0 pretrain.MAE.set.train.epochs=2 \\
      pretrain.MAE.set.train.warmup_epochs=0                             a quick try
  mae-vit compare compare_demo --dry-run
  mae-vit compare compare_demo --report   of finished runs
"""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs the command line of the command `prog`, or of a script; returns the exit code."""

    def job() -> int:
        arguments, report = _parse(argv, prog)
        # Report mistakes in the file before the slow imports below. Skip a pipe: it can be read only once.
        if isinstance(arguments.config, Path) and not arguments.config.is_fifo():
            load_config(CompareConfig, arguments.config, arguments.overrides)
        with slow_imports():
            from mae_vit.comparison.main import compare

        compare(arguments, report=report)
        return 0

    return run_to_exit_code(job)


def _parse(argv: Sequence[str] | None, prog: str | None) -> tuple[Arguments, bool]:
    parser = OneLineParser(
        prog=prog,
        description="Compare networks, pretrained or from scratch, on the same labels. The command pretrains what is\n"
        "missing, chooses each row's settings on validation images, fine-tunes every row with every seed and\n"
        "number of labels, and writes a report.\n"
        "After Ctrl-C or a kill the same command resumes, and finished runs are not repeated.\n"
        "Several machines that see the same folder can run the same command at once: they share the runs.",
        examples=_EXAMPLES,
        epilog=f"{list_sections(CompareConfig.model_fields)}\n{_KEYS_OF_RUNS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config(parser, example="set.train.epochs=10 run.name=try", default="seeds")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, list the runs with their times; run nothing"
    )
    parser.add_argument(
        "--report", action="store_true", help="write the report of the finished runs; run nothing"
    )
    add_local_rank(parser)
    parsed = parser.parse_intermixed_args(argv)
    if parsed.report and parsed.dry_run:
        parser.error("--report has no effect with --dry-run; leave one out")
    config = take_config(parser, parsed, required=True)
    return Arguments(config, parsed.overrides, dry_run=parsed.dry_run), parsed.report
