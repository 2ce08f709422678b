"""The command `mae-vit`: prepare and check data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mae_vit import __version__
from mae_vit.commandline import OneLineParser
from mae_vit.errors import InputError, counted
from mae_vit.prepare_command import add_prepare

EXIT_DAMAGED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130

EXAMPLES = """examples:
  mae-vit prepare digits data/digits                     handwritten digits, embedded: no network
  mae-vit prepare cifar10 data/cifar10                   torchvision's download; also cifar100
  mae-vit prepare photos/ data/photos                    photos/CLASS/*.jpg, photos/train/CLASS/*.jpg or photos/*.jpg
  mae-vit prepare train.tar.gz test.zip data/mine        archives of such folders
  mae-vit prepare photos/ data/small --resize 384 --holdout 1/10
  mae-vit prepare --in-place laion/                      others' webdataset shards, used where they are
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
    add_prepare(commands)
    _add_check(commands)
    return parser


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
