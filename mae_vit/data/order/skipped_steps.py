"""Which steps of the data order a run takes, where some are left out.

A run's n-th step takes the n-th step of the data order that is not skipped. So the list of
the list of skipped steps is all that a run needs to resume exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

# Steps first..stop-1 of the data order, ascending; none touches another.
Skipped = tuple[tuple[int, int], ...]


def data_step(step: int, skipped: Skipped) -> int:
    """Returns the step of the data order that a run's step (from 0) takes."""
    for first, stop in skipped:
        if step < first:
            break
        step += stop - first
    return step


def skip(skipped: Skipped, first: int, stop: int) -> Skipped:
    """Adds the steps first..stop-1."""
    return _merge([*skipped, (first, stop)])


def _merge(windows: Iterable[tuple[int, int]]) -> Skipped:
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(windows):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((first, stop))
    return tuple(merged)
