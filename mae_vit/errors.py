"""Exceptions that become one line for people, and the words that messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad config, command line, data folder or checkpoint.

    Entry points print its message as one line, without a traceback, and exit
    with code 2. The message names what is wrong, where, and the nearest right
    thing.
    """

    def __init__(self, message: str) -> None:
        """Makes one line of `message`."""
        super().__init__(" ".join(message.split()))


class DamagedSample(RuntimeError):
    """A sample that was whole when the run began cannot be read; the message names shard, key and offset.

    The run fails with it (exit code 1): what it has saved is good.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as `did you mean "img_size"?`, or the list of known names."""
    known = sorted(known)
    listed = f"known: {', '.join(known)}" if known else "none are known"
    return closest(name, known) or listed


def closest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as `did you mean "img_size"?`; empty where nothing is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else ""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: `1 shard`, `1,200 shards`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
