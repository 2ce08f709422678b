"""The command `mae-vit`: prepare and check data."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mae_vit import __version__
from mae_vit.commandline import OneLineParser
from mae_vit.errors import InputError, counted

EXIT_DAMAGED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
_NAMED = 5

EXAMPLES = """examples:
  mae-vit prepare digits data/digits                     handwritten digits, embedded: no network
  mae-vit prepare cifar10 data/cifar10                   torchvision's download
  mae-vit prepare photos/ data/photos                    photos/CLASS/*.jpg or photos/train/CLASS/*.jpg
  mae-vit prepare train.tar.gz test.tar.gz data/mine     archives of such folders
  mae-vit check data/mine                                verify every shard
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 (damage found) or 2 (bad input)."""
    try:
        parser = _parser()
        arguments, rest = parser.parse_known_args(argv)
        # Options may stand between the paths, which argparse cannot take in one go.
        if rest and hasattr(arguments, "paths") and not any(word.startswith("-") for word in rest):
            arguments.paths += rest
        elif rest:
            getattr(arguments, "parser", parser).unrecognized(rest)
        code: int = arguments.run(arguments)
        return code
    except InputError as error:
        print(f"mae-vit: error: {error}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        print("mae-vit: interrupted; nothing half-written was left", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="mae-vit",
        description="Prepare and check image data for self-supervised pretraining.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mae-vit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    _add_prepare(commands)
    _add_check(commands)
    return parser


def _add_prepare(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "prepare",
        help="images -> webdataset shards",
        usage="%(prog)s [options] SRC [SRC ...] OUT",
        description="Write images as webdataset shards with dataset.json. Image bytes are stored unchanged. "
        "A later call adds splits.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="SRC... OUT",
        help="sources (digits, cifar10, a folder of class folders, a .tar or .tar.gz of one), then the output",
    )
    parser.add_argument(
        "--root", type=Path, help="where torchvision's copy of cifar10 is, or is downloaded to"
    )
    parser.add_argument(
        "--split", default="train", help="split of images outside of train/, val/, test/ (train)"
    )
    parser.add_argument("--shard-mib", type=int, default=256, metavar="N", help="largest shard, in MiB (256)")
    parser.add_argument(
        "--shard-samples", type=int, default=10_000, metavar="N", help="most samples in one (10000)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace splits that exist")
    parser.set_defaults(run=_prepare, parser=parser)


def _prepare(arguments: argparse.Namespace) -> int:
    # Slow to import (webdataset), so that --help is not.
    from mae_vit.data.prepare import prepare
    from mae_vit.data.sources import open_source

    *specs, out_text = arguments.paths
    if not specs:
        raise InputError(f"prepare needs sources and an output folder, not {out_text} alone (see --help)")
    for name in ("shard_mib", "shard_samples"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1")
    if not arguments.split.replace("_", "").isalnum():
        raise InputError(f'--split "{arguments.split}": letters, digits and _ only')
    begun, out = time.monotonic(), Path(out_text)
    try:
        sources = [open_source(spec, out=out, split=arguments.split, root=arguments.root) for spec in specs]
        report = prepare(
            sources,
            out,
            overwrite=arguments.overwrite,
            shard_bytes=arguments.shard_mib << 20,
            shard_samples=arguments.shard_samples,
        )
    except OSError as error:
        raise InputError(f"{error.filename or out}: {(error.strerror or str(error)).lower()}") from None
    dataset = report.dataset
    for split in report.written:
        info = dataset.splits[split]
        print(f"{split}: {counted(info.samples, 'image')} in {counted(len(info.shards), 'shard')}")
    if report.unreadable:
        print(f"left out {counted(len(report.unreadable), 'unreadable image')}:")
        for line in report.unreadable[:_NAMED]:
            print(f"  {line}")
        if len(report.unreadable) > _NAMED:
            print(f"  and {len(report.unreadable) - _NAMED} more")
    if report.ignored:
        print(f"ignored {counted(report.ignored, 'other file')}")
    print(f"{out}: {len(dataset.classes)} classes, {time.monotonic() - begun:.1f} s")
    return 0


def _add_check(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="verify every shard",
        description="Verify every shard against dataset.json; exit 1 and name what is damaged.",
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="the data folder")
    parser.add_argument("--decode", action="store_true", help="decode every image too")
    parser.set_defaults(run=_check, parser=parser)


def _check(arguments: argparse.Namespace) -> int:
    from mae_vit.data.check import check

    problems = check(arguments.path, decode_all=arguments.decode)
    for problem in problems:
        print(f"damaged: {problem}")
    print(
        f"{arguments.path}: {counted(len(problems), 'problem') if problems else 'all shards are as described'}"
    )
    return EXIT_DAMAGED if problems else 0


if __name__ == "__main__":
    sys.exit(main())
