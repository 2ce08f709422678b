"""Parts of messages: counts, durations, reasons, the nearest valid choice."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from math import copysign
from pathlib import Path


def plain_text(name: str) -> str:
    """Writes unprintable characters and invalid UTF-8 as backslash escapes."""
    if name.isascii() and name.isprintable():
        return name
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# Smallest similarity of a proposed file name, 0..1 (difflib's ratio).
_ALIKE = 0.6
GPUS = (
    "a GPU is found automatically; CUDA_VISIBLE_DEVICES chooses which, run.device=cpu uses none, and deepspeed or "
    "torchrun starts a process for each"
)
# How other programs choose a GPU: device=cuda, gpus=1, num_gpus=2, trainer.accelerator=gpu, --gpu-ids 0
_DEVICES = re.compile(
    r"((no|use|num|n)[-_]?)?(cuda|gpus?|devices?|accelerators?)([-_]?(ids?|count|per[-_]node))?"
)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as `did you mean "img_size"?`, or the list of known names."""
    known = sorted(known)
    listed = f"known: {', '.join(known)}" if known else "none are known"
    return closest(name, known) or listed


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Returns a hint such as `did you mean "img_size"?`; empty if no name reaches the similarity `cutoff` (0..1)."""
    nearest_name = _most_alike(name, known, cutoff)
    return "" if nearest_name is None else f'did you mean "{nearest_name}"?'


def closest_path(path: Path, among: Iterable[Path] | None = None) -> str:
    """Returns a hint such as `did you mean "runs/photos"?` for a missing path; empty if no other is like it.

    Args:
        path: a path that does not exist. Folders on the way to it may be misspelled too.
        among: candidates, compared by name without extension; None for all existing paths.
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


def device_hint(name: str) -> str:
    """Returns how to choose a GPU, for a key or option with which other programs choose it; empty for others."""
    return GPUS if _DEVICES.fullmatch(name.lower()) else ""


def _most_alike(name: str, known: Iterable[str], cutoff: float) -> str | None:
    # Among names that differ only in case, take the one closest in case.
    by_lower: dict[str, list[str]] = {}
    for each in sorted(known):
        by_lower.setdefault(each.lower(), []).append(each)
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return difflib.get_close_matches(name, by_lower[close[0]], n=1, cutoff=0)[0] if close else None


def error_reason(error: BaseException) -> str:
    """Formats an OSError as a phrase for use after a colon: `no such file or directory`; others as their first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return next(iter(str(error).splitlines()), type(error).__name__)


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: `1 shard`, `1,200 shards`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_decimal(value: float, sign: str = "") -> str:
    """Formats a number with one decimal, halves away from zero: `55.0` for 100 * 0.5495, whose float is less."""
    return f"{value + copysign(1e-9, value):{sign}.1f}"


def format_rate(per_second: float) -> str:
    """Formats a rate as a whole number, or below 10 with two digits: `193`, `8.1`, `0.34`."""
    return f"{per_second:.0f}" if per_second >= 9.95 else f"{per_second:.2g}"


def format_duration(seconds: float) -> str:
    """Returns a time as `h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
