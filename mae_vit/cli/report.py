"""`mae-vit report`: one page on a pretraining run."""

from __future__ import annotations

import argparse
from pathlib import Path

from mae_vit.config.command_line import OneLineParser, as_path
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import error_reason

_DESCRIPTION = """Write one HTML page on a pretraining run: a verdict in words (did it learn, was it long
enough, what to do next), curves, pictures over time, plan, environment, damaged images, incidents. The page is one file
that needs no other. The run may be finished, running, interrupted or failed."""


def add_report(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `report`."""
    parser = commands.add_parser(
        "report", help="write a page on a run: verdict, curves, pictures", description=_DESCRIPTION
    )
    parser.add_argument("path", type=as_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--out", type=as_path, metavar="FILE.html", help="file to write (RUN/report.html)")
    parser.set_defaults(run=run_report, parser=parser)


def run_report(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        InputError: if there is no such run, or if the page cannot be written.
    """
    # Imports matplotlib: not for --help.
    from mae_vit.pretraining.report.page import write_page
    from mae_vit.pretraining.report.run_record import read_run
    from mae_vit.pretraining.report.verdict import verdict

    record = read_run(arguments.path)
    out: Path = arguments.out or arguments.path / "report.html"
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give a file, such as {out / 'report.html'}")
    page = write_page(record)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error_reason(error)}; give --out FILE") from None
    print("verdict   " + "\n          ".join(verdict(record)))
    print(f"page      {out} (open in a browser)")
    return 0
