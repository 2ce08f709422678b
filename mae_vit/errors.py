"""Exceptions that become one line for people, and the words that messages share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# A path may be long; no name is.
_LONGEST_WORD = 1000
# How alike a name of a file must be to be proposed, 0..1 (difflib's ratio).
_ALIKE = 0.6


class InputError(ValueError):
    """Bad config, command line, data folder or checkpoint.

    Entry points print its message as one line, without a traceback, and exit
    with code 2. The message names what is wrong, where, and the nearest right
    thing.
    """

    def __init__(self, message: str) -> None:
        """Makes one line of `message`; what is not printable, or endless, in it does not reach the terminal."""
        words = (
            w if len(w) <= _LONGEST_WORD else f"{w[:60]}...({len(w)} characters)" for w in message.split()
        )
        shown = (c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(words))
        super().__init__("".join(shown))


@dataclass(frozen=True)
class Damage:
    """A sample that cannot be read, as `quarantine.jsonl` tells it.

    Attributes:
        sample: its number in its split.
        shard: the file that it belongs to.
        key: what its members share; None where it cannot be told.
        offset: of its image in the shard; None where there is none.
        reason: in short.
    """

    sample: int
    shard: str
    key: str | None
    offset: int | None
    reason: str

    def __str__(self) -> str:
        """Names shard, key and offset, then the reason."""
        key, offset = ("?" if value is None else str(value) for value in (self.key, self.offset))
        # Keys come from files: on a terminal they are to be seen, not obeyed.
        shown = key if key.isascii() and key.isprintable() else ascii(key)
        return f"shard {self.shard}, key {shown}, offset {offset}: {self.reason}"


class DamagedSample(RuntimeError):
    """Samples that were asked for cannot be read.

    Uncaught, the run fails with it (exit code 1): what it has saved is good.

    Attributes:
        found: where in the request each damaged sample stands, and what it is.
        folder: of the shards.
    """

    def __init__(self, found: Sequence[tuple[int, Damage]], folder: Path) -> None:
        """Names the first of `found`, which must not be empty."""
        # By these it is made again behind the pipe of a worker.
        super().__init__(found, folder)
        self.found, self.folder = found, folder

    def __str__(self) -> str:
        """One line for people."""
        more = f" (and {len(self.found) - 1:,} more of its batch)" if len(self.found) > 1 else ""
        return f"cannot read {self.found[0][1]}{more}: `mae-vit check {self.folder}` lists all such"


class Unreachable(RuntimeError):
    """Data that lie elsewhere cannot be had now; the message says what, and since when.

    Uncaught, the run is to be started again (exit code 75), from what it has saved.
    """


def damage_allowed(share: float, samples: int) -> int:
    """How many of `samples` may be damaged: `share` of them, rounded down."""
    # Of 100 samples, 0.29 are 28.999999999999996.
    return int(share * samples + 1e-9)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as `did you mean "img_size"?`, or the list of known names."""
    known = sorted(known)
    listed = f"known: {', '.join(known)}" if known else "none are known"
    return closest(name, known) or listed


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Returns a hint such as `did you mean "img_size"?`; empty where nothing is as alike as `cutoff` (0..1)."""
    found = _most_alike(name, known, cutoff)
    return "" if found is None else f'did you mean "{found}"?'


def closest_path(path: Path, among: Iterable[Path] | None = None) -> str:
    """Returns a hint such as `did you mean "runs/photos"?` where there is no `path`; empty without one like it.

    Args:
        path: that is not there. Folders on the way to it may be misspelled too.
        among: what may be meant, by its name without extension; None for what lies there.
    """
    if among is not None:
        stems = {candidate.stem: candidate for candidate in among}
        stem = _most_alike(path.stem, stems, _ALIKE)
        return "" if stem is None else f'did you mean "{stems[stem]}"?'
    there = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if part != ".." and not os.path.lexists(there / part):
            try:
                named = _most_alike(part, os.listdir(there), _ALIKE)
            except OSError:
                named = None
            if named is None:
                return ""
            part = named
        there /= part
    return f'did you mean "{there}"?'


def _most_alike(name: str, known: Iterable[str], cutoff: float) -> str | None:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def reason_of(error: BaseException) -> str:
    """Returns what is said of a failure, to stand behind a colon: `no such file or directory`; of others a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return next(iter(str(error).splitlines()), type(error).__name__)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: `1 shard`, `1,200 shards`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def clock(seconds: float) -> str:
    """Returns a time as `h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
