"""The command line of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mae_vit.config.command_line import OneLineParser
from mae_vit.core.errors import EXIT_FAILED, EXIT_INPUT, EXIT_REQUEUE, InputError
from mae_vit.runtime.failures import print_error

ROOT = Path(__file__).resolve().parents[2]
# Minutes that we expect on an H100 or H200, and what comes of them.
PARTS = {
    "rates": (12, "Ti/4, B/16, L/16, H/14: images/s, share of peak, memory; transformers' ViTMAE"),
    "feed": (5, "decoding alone, and runs from JPEGs: rate, share of waiting"),
    "views": (6, "small images in memory: views by the device and by workers; runs of both"),
}
_HELP = f"""What only a GPU can show, in parts of a few minutes; each figure is at once a line in FOLDER/PART.jsonl.

A part that meets its time limit names the figures that are left, for --only, and exits {EXIT_REQUEUE}; a figure that
fails takes no other with it, and the exit code is {EXIT_FAILED}.

parts, and minutes that we expect on an H100 or H200:
{chr(10).join(f"  {name:<8} {minutes:>2}  {says}" for name, (minutes, says) in PARTS.items())}

`python -m benchmarks.gpu quarter-hour CONFIG --limit SECONDS` runs a whole comparison, call by call.
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; raises InputError for anything that does not fit."""
    parser = OneLineParser(
        prog="python -m benchmarks.gpu",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    out = "where results lie, a file for each part"
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=out)
    only = "figures of these names alone ('B/16*')"
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help=only)
    parser.add_argument("--tiny", action="store_true", help="tiny models and data: that all parts work")
    limit = "of each part, after which nothing is begun and what runs is ended (12)"
    parser.add_argument("--limit", type=float, default=12.0, metavar="MINUTES", help=limit)
    parser.add_argument("--commit", help="of the sources, for the record, where they are a copy without git")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["quarter-hour"]:
            # Imports torch.
            from benchmarks.gpu.side_by_side import main as side_by_side

            return side_by_side(words[1:])
        return _measure(parse(words))
    except InputError as error:
        print_error(error)
        return EXIT_INPUT


def _measure(arguments: argparse.Namespace) -> int:
    # Import torch: the help comes without it.
    from benchmarks.gpu.figures import Lines, measure, wanted
    from mae_vit.training.outputs.environment import describe_environment, versions_of

    environment = describe_environment(["benchmarks.gpu", *sys.argv[1:]], 1)
    environment["packages"] |= versions_of(["transformers"])
    gpus = environment["gpus"]
    if not gpus and not arguments.tiny:
        raise InputError("no GPU is seen here: --tiny shows on a CPU that each part works")
    about = {
        "tiny": arguments.tiny,
        "commit": arguments.commit or environment["git_commit"],
        "sources": environment["source_digest"],
        "device": gpus[0] if gpus else environment["processor"],
    }
    # Processes that measure find the sources wherever they are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    code = 0
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as scratch:
        chosen, known = {}, []
        for part in arguments.parts:
            module = import_module(f"benchmarks.gpu.parts.{part}")
            waves = module.waves(tiny=arguments.tiny, scratch=Path(scratch))
            known += [key for wave in waves for group in wave for key in group]
            kept = [[wanted(group, arguments.only) for group in wave] for wave in waves]
            chosen[part] = [there for wave in kept if (there := [group for group in wave if group])]
        if not any(chosen.values()):
            words = " ".join(arguments.only)
            raise InputError(f"--only {words}: no such figure; there are {', '.join(known)}")
        arguments.out.mkdir(parents=True, exist_ok=True)
        for part, waves in chosen.items():
            lines = Lines(arguments.out / f"{part}.jsonl", part, about)
            lines.append("environment", environment)
            failed, left = measure(waves, lines, time.monotonic() + 60 * arguments.limit)
            if failed:
                print(f"{part}: failed: {', '.join(failed)}", file=sys.stderr)
                code = EXIT_FAILED
            if left:
                print(f"{part}: no time was left for {', '.join(left)}", file=sys.stderr)
                code = code or EXIT_REQUEUE
    return code


if __name__ == "__main__":
    sys.exit(main())
