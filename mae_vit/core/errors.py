"""Exceptions that end as one readable line, and exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A run failed, or a check found a problem.
EXIT_FAILED = 1
# Bad config, command line or input.
EXIT_INPUT = 2
# EX_TEMPFAIL of sysexits.h: run again. A signal stopped the run after a save, another rank is gone, or
# remote data or a run folder behind a URL are unavailable.
EXIT_REQUEUE = 75
# Ctrl-C before there was anything to save, or a second Ctrl-C; the code that shells report.
EXIT_INTERRUPTED = 130


# A path may be long; no name is.
_LONGEST_WORD = 1000


class InputError(ValueError):
    """Bad config, command line, data folder or checkpoint.

    Entry points print one line for each mistake, without a traceback, and exit with code 2. A line states what is
    wrong, where, and the nearest valid choice.

    Attributes:
        lines: one for each mistake; `str()` joins them by "; ".
    """

    def __init__(self, *mistakes: str) -> None:
        """Formats each mistake as one line; escapes unprintable characters and shortens very long words."""
        super().__init__(*mistakes)
        self.lines = tuple(_one_line(mistake) for mistake in mistakes)

    def __str__(self) -> str:
        return "; ".join(self.lines)


def _one_line(message: str) -> str:
    words = (w if len(w) <= _LONGEST_WORD else f"{w[:60]}...({len(w)} characters)" for w in message.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(words))


@dataclass(frozen=True)
class Damage:
    """A sample that cannot be read, as `quarantine.jsonl` records it.

    Attributes:
        shard: the file that it belongs to.
        offset: place of its image in the shard, in bytes; None if unknown.
    """

    sample: int
    shard: str
    key: str | None
    offset: int | None
    reason: str

    def __str__(self) -> str:
        key, offset = ("?" if value is None else str(value) for value in (self.key, self.offset))
        # Keys come from files: a terminal must not obey control characters in them.
        shown = key if key.isascii() and key.isprintable() else ascii(key)
        return f"shard {self.shard}, key {shown}, offset {offset}: {self.reason}"


class DamagedSample(RuntimeError):
    """Requested samples cannot be read.

    Uncaught, it ends the run with exit code 1; saved checkpoints are good.

    Attributes:
        damaged: each damaged sample, by its position in the request.
        folder: folder of the shards.
    """

    def __init__(self, damaged: Sequence[tuple[int, Damage]], folder: Path) -> None:
        """The message names the first of `damaged`, which must not be empty."""
        # Pickle passes these to `__init__` again when a worker sends the error.
        super().__init__(damaged, folder)
        self.damaged, self.folder = damaged, folder

    def __str__(self) -> str:
        more = f" (and {len(self.damaged) - 1:,} more of its batch)" if len(self.damaged) > 1 else ""
        return f"cannot read {self.damaged[0][1]}{more}: `mae-vit check {self.folder}` lists all such"


class FetchUnavailable(RuntimeError):
    """Remote data cannot be reached now; the message states which, and since when.

    Uncaught, it ends the run with exit code 75: start it again to resume.
    """


class RemoteError(OSError):
    """A run folder behind a URL cannot be read or written; the message names the URL without credentials."""


class RemoteUnavailable(RemoteError):
    """A retry may help: uncaught, it ends the run with exit code 75. All ranks raise it together."""


def damage_allowed(share: float, samples: int) -> int:
    """How many of `samples` may be damaged: `share` of them, rounded down."""
    # 0.29 * 100 is 28.999999999999996.
    return int(share * samples + 1e-9)
