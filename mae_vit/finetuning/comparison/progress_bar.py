"""One progress bar over many runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from mae_vit.finetuning.comparison.spec import RunSpec


class Bar:
    """One bar over all runs of a comparison, in FLOPs."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        """Counts `specs`."""
        self._specs = specs
        self._first: dict[RunSpec, float] = {}  # work done when first read
        self._done: dict[RunSpec, tuple[float, float]] = {}
        self._bar = tqdm(
            total=1.0,
            unit="",
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            # One line a minute when written to a file.
            mininterval=0.5 if sys.stderr.isatty() else 60,
            miniters=0,
            # Runs differ in speed: take the mean rate of this process.
            smoothing=0,
        )

    def show(self, running: Sequence[RunSpec], *, waits: bool = False) -> None:
        """Reads the progress of all runs; `waits` tells whether there is more to run."""
        works = {spec: self._work(spec) for spec in self._specs}
        known = [work[1] for work in works.values() if work and work[1]] or [1.0]
        # A run reports its work when it begins. Until then, training counts as the mean run, scoring as the smallest.
        mean, least = sum(known) / len(known), min(known)
        totals = [work[1] if work else least if spec.scores else mean for spec, work in works.items()]
        whole = sum(totals) or 1.0
        so_far = {spec: work[0] if work else 0.0 for spec, work in works.items()}
        # Leave the work of earlier processes out of the rate.
        self._first = so_far | self._first
        self._bar.initial = sum(min(self._first[spec], done) for spec, done in so_far.items()) / whole
        done = sum(work is not None and work[0] == work[1] for work in works.values())
        self._bar.set_description_str(f"{done}/{len(works)} runs", refresh=False)
        names = ", ".join(spec.name for spec in running)
        self._bar.set_postfix_str(names or ("waiting for other processes" if waits else ""), refresh=False)
        self._bar.update(max(0.0, min(sum(so_far.values()) / whole, 1.0)) - self._bar.n)

    def _work(self, spec: RunSpec) -> tuple[float, float] | None:
        """Reads a run's work; finished runs only once."""
        work = self._done.get(spec) or spec.work()
        if work is not None and work[0] == work[1]:
            self._done[spec] = work
        return work

    def close(self) -> None:
        """Closes the bar, which stays."""
        self._bar.close()
