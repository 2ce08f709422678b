"""Which split is trained on, and which is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError, damage_allowed
from mae_vit.core.messages import count_of
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.remote.folder import RemoteFolder
from mae_vit.data.shards.index_rows import UNKNOWN_LABEL

_NAMED = 3


def open_training_index(
    folder: Path, split: str, *, damage_budget: float, say: bool, remote: RemoteFolder | None = None
) -> ShardIndex:
    """Opens the index of a split that is trained on, over damaged shards too.

    Args:
        folder: of the shards.
        split: its name.
        damage_budget: share of its samples that may be lost.
        say: whether this process warns of damage.
        remote: what the folder stands in for.

    Raises:
        InputError: if more are lost, or there is no such split.
    """
    index = open_index(folder, split, tolerant=True, remote=remote)
    if not index.problems:
        return index
    lost, allowed = len(index.lost), damage_allowed(damage_budget, len(index))
    problems = [f"shard {folder / file} {problem}" for file, problem in index.problems.items()]
    more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    unreadable = f'{lost:,} of {count_of(len(index), "sample")} of split "{split}" cannot be read'
    where = f"{'; '.join(problems[:_NAMED])}{more}: see `mae-vit check {folder}`"
    if lost > allowed:
        raise InputError(
            f"{unreadable}, data.damage_budget={damage_budget:g} allows {allowed:,}: {where}, mend the shards or raise "
            "the budget"
        )
    if say:
        budget = f"data.damage_budget={damage_budget:g} allows {allowed:,}"
        what = f"{unreadable}; others take their places ({budget})" if lost else "a shard is not as described"
        print(f"warning: {what}: {where}", file=sys.stderr)
    return index


def check_labels(index: ShardIndex) -> None:
    """Makes sure that lost samples have left their labels: samples are chosen by them.

    Raises:
        InputError: naming the first shard.
    """
    unknown = np.flatnonzero(index.labels == UNKNOWN_LABEL)
    if len(unknown):
        first = index.damage(int(unknown[0]), index.why_lost(int(unknown[0])))
        raise InputError(
            f'labels of {count_of(len(unknown), "sample")} of split "{index.split}" are lost, and samples are chosen '
            f"by them: {first}: mend it (see `mae-vit check {index.folder}`)"
        )


def find_split(
    splits: Iterable[str], *, wanted: str | None, training: str, known: Sequence[str], key: str
) -> str | None:
    """Names the split that is measured and not trained on.

    Args:
        splits: that there are.
        wanted: the one that is asked for, there or not.
        training: the one that is trained on.
        known: those looked for otherwise, best first.
        key: by which it is asked for.

    Returns:
        None where none is asked for, and none of the known ones is there.

    Raises:
        InputError: if it is the one that is trained on.
    """
    others = [name for name in splits if name != training]
    if wanted == training:
        raise InputError(
            f'{key}="{wanted}" is what data.split trains on: give another split '
            f"({', '.join(sorted(others)) or 'there is none'})"
        )
    return wanted or next((name for name in known if name in others), None)
