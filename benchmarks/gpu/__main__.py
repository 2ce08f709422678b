"""The command line of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.jobs import Account, Job, run_jobs
from benchmarks.gpu.lines import ENVIRONMENT, ROOT, Identity, Lines, digest_sources
from benchmarks.gpu.needs import check_needs
from mae_vit.config.command_line import OneLineParser
from mae_vit.core.errors import InputError
from mae_vit.runtime.exit_codes import EXIT_FAILED, EXIT_INPUT, EXIT_REQUEUE
from mae_vit.runtime.failures import print_error

_REPORT = "report"


@dataclass(frozen=True)
class Part:
    """What can be measured by itself.

    Attributes:
        minutes: that it takes on one H100 or H200, as far as we expect.
        says: what comes of it.
    """

    minutes: int
    says: str


PARTS = {
    "parity": Part(4, "masks, losses and checkpoints of a CPU and of the GPU; compiled against eager"),
    "waits": Part(2, "how often a step waits for the device: torch engine, ZeRO 0 to 3"),
    "rates": Part(8, "Ti/4, B/16, L/16, H/14: images/s, share of peak, memory; transformers' ViTMAE"),
    "engines": Part(6, "torch engine, ZeRO 0 and 1 in turns: ViT-B, micro-batches of 32 and 256"),
    "feed": Part(5, "decoding alone, and runs from JPEGs and from memory: rate, share of waiting"),
    "save": Part(3, "how long a checkpoint of B, L and H holds training up"),
    "tests": Part(12, "pytest -m gpu, a line for each test; more than one call"),
}
_LIMIT_MINUTES = 8.0
_ALL = ", ".join(PARTS)
_HELP = f"""What only a GPU can show, in parts of a few minutes.

Each figure is a JSON line in FOLDER/PART.jsonl as soon as it is known. The same command goes on where
the last one ended: figures of the same sources and device are not measured again. A part that meets its
time limit says what is left, and exits {EXIT_REQUEUE}; a figure that fails takes no other with it, and the exit
code is {EXIT_FAILED}.

parts, and minutes that we expect on an H100 or H200:
{chr(10).join(f"  {name:<8} {part.minutes:>2}  {part.says}" for name, part in PARTS.items())}

examples:
  python -m benchmarks.gpu waits parity --out results       two parts
  python -m benchmarks.gpu rates --out results --only 'B/16*' machine
  python -m benchmarks.gpu report results                   tables, as markdown
  python -m benchmarks.gpu feed --out results --tiny        that it works, in seconds, on a CPU too
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        return _run(parse(argv))
    except InputError as error:
        print_error(error)
        return EXIT_INPUT


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, and checks its parts.

    Raises:
        InputError: for anything that does not fit.
    """
    parser = OneLineParser(
        prog="python -m benchmarks.gpu",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{_ALL}; or {_REPORT} FOLDER")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results lie, a file for each part")
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", default=["*"], help="figures of these names alone ('B/16*')"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and data, to see that all parts work"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=_LIMIT_MINUTES,
        metavar="MINUTES",
        help=f"of each part, after which nothing is begun and what runs is ended ({_LIMIT_MINUTES:g})",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="keep data made on the spot here, for the next call (temporary)",
    )
    parser.add_argument("--commit", help="of the sources, for the record, where they are a copy without git")
    arguments = parser.parse_args(argv)
    parts = arguments.parts
    if parts[:1] == [_REPORT]:
        if len(parts) != 2:
            raise InputError(f"{_REPORT} takes one folder: python -m benchmarks.gpu {_REPORT} FOLDER")
        return arguments
    for name in parts:
        if name not in PARTS:
            raise InputError(f'no part "{name}": {_ALL}; or {_REPORT} FOLDER')
    if parts and arguments.out is None:
        raise InputError("--out FOLDER says where results go")
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    parts = arguments.parts
    if parts[:1] == [_REPORT]:
        from benchmarks.gpu.report import write_report

        print(write_report(Path(parts[1])))
        return 0
    if not parts:
        print(_HELP)
        return 0
    check_needs(parts)
    return _measure(parts, arguments)


def _measure(parts: Sequence[str], arguments: argparse.Namespace) -> int:
    # Imports torch: the list of parts and a report come without it.
    from mae_vit.training.outputs.environment import describe_environment, versions_of

    environment = describe_environment(["benchmarks.gpu", *sys.argv[1:]], 1)
    environment["packages"] |= versions_of(["transformers"])
    gpus = environment["gpus"]
    if not gpus and not arguments.tiny:
        raise InputError("no GPU is seen here: --tiny shows on a CPU that each part works")
    identity = Identity(
        arguments.commit or environment["git_commit"],
        digest_sources(),
        gpus[0] if gpus else environment["processor"],
        arguments.tiny,
    )
    # Processes that measure find the sources wherever they are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as temporary:
        scratch = arguments.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        jobs = {
            name: import_module(f"benchmarks.gpu.parts.{name}").jobs(tiny=arguments.tiny, scratch=scratch)
            for name in parts
        }
        chosen = {name: choose_keys(jobs[name], arguments.only) for name in parts}
        if not any(chosen.values()):
            known = ", ".join(key for name in parts for job in jobs[name] for key in job.keys)
            raise InputError(f"--only {' '.join(arguments.only)}: no such figure; there are {known}")
        accounts = {}
        for name in parts:
            lines = Lines(arguments.out, name, identity)
            if chosen[name]:
                lines.append(ENVIRONMENT, environment)
            accounts[name] = run_jobs(chosen[name], lines, limit_s=60 * arguments.limit)
    return _conclude(accounts)


def choose_keys(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """Keeps the figures whose names match a pattern."""
    chosen = []
    for job in jobs:
        kept = tuple(key for key in job.keys if any(fnmatch.fnmatchcase(key, one) for one in patterns))
        if kept:
            chosen.append(replace(job, keys=kept))
    return chosen


def _conclude(accounts: dict[str, Account]) -> int:
    """Says what is not there, and how to go on."""
    code = 0
    for name, account in accounts.items():
        for key, reason in account.failed.items():
            print(f"{name}: {key}: failed: {reason}", file=sys.stderr)
            code = EXIT_FAILED
        if account.left:
            left = ", ".join(account.left)
            print(f"{name}: no time was left for {left}: the same command resumes", file=sys.stderr)
            code = code or EXIT_REQUEUE
    return code


if __name__ == "__main__":
    sys.exit(main())
