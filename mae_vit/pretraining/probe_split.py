"""Which held-out images the online probe fits on and scores, or why there is no probe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mae_vit.config.schema import MonitorSection
from mae_vit.core.errors import InputError
from mae_vit.data.index import ShardIndex
from mae_vit.evaluation.few_shot import draw_shots

_SHOTS = 25
# Images to fit, over all classes: a closed form of this size takes almost no time.
_MAX_SUPPORT = 1000


@dataclass(frozen=True)
class ProbeSplit:
    """Labeled held-out images, by their numbers in the split.

    Attributes:
        support: images to fit on.
        queries: images to score.
        shots: most images of a class among `support`.
        why_none: why there is no probe; empty if there is one.
    """

    support: np.ndarray
    queries: np.ndarray
    shots: int = 0
    why_none: str = ""

    @property
    def samples(self) -> np.ndarray:
        """All of them, support first."""
        return np.concatenate([self.support, self.queries])


def choose_probe(
    monitor: MonitorSection, index: ShardIndex | None, world_size: int, why_none: str
) -> ProbeSplit:
    """Chooses images of the held-out split for the probe; `why_none`: why there is no such split, if `index` is None.

    Raises:
        InputError: for an option that cannot take effect.
    """
    chosen = _choose(monitor, index, world_size, why_none)
    if isinstance(chosen, ProbeSplit):
        return chosen
    for name in ("probe_every_steps", "probe_every_epochs"):
        if (value := getattr(monitor, name)) is not None:
            raise InputError(f"monitor.{name}={value} has no effect: there is no probe ({chosen})")
    return ProbeSplit(np.zeros(0, np.int64), np.zeros(0, np.int64), why_none=chosen)


def _choose(
    monitor: MonitorSection, index: ShardIndex | None, world_size: int, why_none: str
) -> ProbeSplit | str:
    """Returns the images, or why there are none."""
    if index is None:
        return why_none
    if not monitor.probe_queries:
        return "monitor.probe_queries=0"
    labels, most = np.asarray(index.labels), max(1, _MAX_SUPPORT // max(1, len(index.dataset.classes)))
    support, queries = draw_shots(labels, shots=min(_SHOTS, most), queries=monitor.probe_queries)
    if len(np.unique(labels[support])) < 2 or not len(queries):
        return f'split "{index.split}" has no labels of two classes, with two images of each'
    if len(support) + len(queries) < world_size:
        return f'split "{index.split}" has fewer labeled images than there are ranks'
    return ProbeSplit(support, queries, int(np.bincount(labels[support]).max()))
