"""What all command lines share: exit codes, a parser, options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from mae_vit.errors import InputError, closest, nearest

# A run failed, or a check found something.
EXIT_FAILED = 1
# Bad config, command line or input.
EXIT_INPUT = 2
# EX_TEMPFAIL of sysexits.h, to be run again: stopped by a signal after a save, another rank is
# gone, or data that lie elsewhere cannot be had now.
EXIT_REQUEUE = 75
# What shells say of a program that Ctrl-C ended: before there was anything to save, or by a second one.
EXIT_INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are an `InputError`: one line with a hint instead of a usage page."""

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        hint = self._hint(message)
        raise InputError(f"{message}{f': {hint}' if hint else ''} (see --help)")

    def unrecognized(self, words: Sequence[str]) -> NoReturn:
        """Raises InputError for words that this parser does not know."""
        self.error(f"unrecognized arguments: {' '.join(words)}")

    def _hint(self, message: str) -> str:
        """What was meant by an option or a choice that argparse does not know, as far as it says which."""
        if option := re.match(r"unrecognized arguments: (?:.*? )?(--?[A-Za-z][\w-]*)", message):
            known = [
                name
                for action in self._actions
                if action.help != argparse.SUPPRESS
                for name in action.option_strings
            ]
            long = [name for name in known if name.startswith("--")]
            if any(action.dest == "overrides" for action in self._actions):
                # Most often it is a key of the config that was meant.
                settings = (
                    f"known: {', '.join(sorted(long))}; settings are KEY.PATH=VALUE, such as train.epochs=10"
                )
                return closest(option[1], long, cutoff=0.6) or settings
            return nearest(option[1], long)
        if choice := re.search(r"invalid choice: '([^']*)'", message):
            # argparse lists the choices itself.
            return closest(choice[1], [str(one) for action in self._actions for one in action.choices or ()])
        return ""


def add_allow_pipe(parser: argparse.ArgumentParser) -> None:
    """Adds the option by which commands may run."""
    parser.add_argument(
        "--allow-pipe",
        action="store_true",
        help="run the command of a data.path such as 'pipe:ssh HOST cat DIR/{}': by a shell, so look at it first",
    )


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Takes what the `deepspeed` launcher adds to a command line; the environment says it too."""
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
