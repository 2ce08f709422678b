"""Maps run steps to data steps when some data steps are skipped.

A run's n-th step takes the n-th data step that is not skipped. The step number and the
list of skipped steps are therefore all that a run needs to resume exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

# Windows (first, stop) of data steps first..stop-1, ascending, with at least one step between two windows.
Skipped = tuple[tuple[int, int], ...]


def data_step(step: int, skipped: Skipped) -> int:
    """Returns the data step that a run's step takes; both count from 0."""
    for first, stop in skipped:
        if step < first:
            break
        step += stop - first
    return step


def skip(skipped: Skipped, first: int, stop: int) -> Skipped:
    """Adds the data steps first..stop-1."""
    return _merge([*skipped, (first, stop)])


def _merge(windows: Iterable[tuple[int, int]]) -> Skipped:
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(windows):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((first, stop))
    return tuple(merged)
