"""`mae-vit check`: compares every shard with dataset.json."""

from __future__ import annotations

import argparse

from mae_vit.config.command_line import OneLineParser, as_path_text
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.core.urls import is_url, redact_url
from mae_vit.runtime.exit_codes import EXIT_FAILED


def add_check(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `check`."""
    parser = commands.add_parser(
        "check",
        help="verify every shard",
        description="Compare every shard with its checksum in dataset.json. List damaged shards; exit 1 if any.",
    )
    parser.add_argument("path", type=as_path_text, metavar="DIR", help="the data folder")
    parser.add_argument("--decode", action="store_true", help="also decode every image")
    parser.set_defaults(run=_check, parser=parser)


def _check(arguments: argparse.Namespace) -> int:
    from mae_vit.data.data_path import resolve_data_path
    from mae_vit.data.shards.verify import check

    if is_url(arguments.path):
        raise InputError(
            f"{redact_url(arguments.path)}: shards elsewhere are verified as runs fetch them; give a folder"
        )
    problems = check(resolve_data_path(arguments.path).folder, decode_all=arguments.decode)
    for problem in problems:
        print(f"damaged: {problem}")
    print(
        f"{arguments.path}: {count_of(len(problems), 'problem') if problems else 'all shards are as described'}"
    )
    return EXIT_FAILED if problems else 0
