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

_NAMED = 3


def open_training_index(
    folder: Path, split: str, *, damage_budget: float, say: bool, remote: RemoteFolder | None = None
) -> ShardIndex:
    """Opens the index of a split that is trained on, also if shards of it are missing or cut short.

    Args:
        folder: folder of the shards.
        split: its name.
        damage_budget: share of its samples that may be lost.
        say: whether this process warns of damage.
        remote: what the folder stands in for.

    Raises:
        InputError: if more are lost, or there is no such split.
    """
    index = open_index(folder, split, remote=remote)
    lost, problems = _missing_samples(index)
    if not problems:
        return index
    allowed = damage_allowed(damage_budget, len(index))
    what = f'{len(lost):,} of {count_of(len(index), "sample")} of split "{split}" cannot be read'
    budget, where = f"data.damage_budget={damage_budget:g} allows {allowed:,}", _shorten(problems, folder)
    if len(lost) > allowed:
        raise InputError(f"{what}, {budget}: {where}, mend the shards or raise the budget")
    if say:
        print(f"warning: {what}; others take their places ({budget}): {where}", file=sys.stderr)
    return index


def open_whole_index(folder: Path, split: str, *, remote: RemoteFolder | None = None) -> ShardIndex:
    """Opens the index of a split of which every image counts, as in a measurement.

    Raises:
        InputError: if a shard is missing or of another size, or there is no such split.
    """
    index = open_index(folder, split, remote=remote)
    _, problems = _missing_samples(index)
    if problems:
        raise InputError(f'split "{split}" must be whole: {_shorten(problems, folder)}')
    return index


def check_held_out(index: ShardIndex, held_out: np.ndarray) -> None:
    """Refuses held-out images that are known to be lost: now rather than at the first evaluation.

    Raises:
        InputError: naming the first.
    """
    missing, problems = _missing_samples(index)
    lost = np.intersect1d(missing, held_out)
    if len(lost):
        raise InputError(
            f"{len(lost)} of the {len(held_out):,} held-out images cannot be read: "
            f"{_shorten(problems, index.folder)}, mend the shards, or train on all (finetune.holdout=0)"
        )


def _missing_samples(index: ShardIndex) -> tuple[np.ndarray, list[str]]:
    """Lists samples that shards here lack, by the shards' sizes, and says of each such shard what is wrong."""
    shards, sizes, problems = index.split_info.shards, index.misfit_shards(), list[str]()
    for number, size in sizes.items():
        problem = (
            "is missing" if size is None else f"has {size} bytes, dataset.json says {shards[number].bytes}"
        )
        problems.append(f"shard {index.folder / shards[number].file} {problem}")
    return index.samples_beyond(sizes), problems


def _shorten(problems: Sequence[str], folder: Path) -> str:
    more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return f"{'; '.join(problems[:_NAMED])}{more}: see `mae-vit check {folder}`"


def find_split(
    splits: Iterable[str], *, wanted: str | None, training: str, known: Sequence[str], key: str
) -> str | None:
    """Names the split that is measured and not trained on.

    Args:
        splits: that there are.
        wanted: the one that is asked for, there or not.
        training: the one that is trained on.
        known: those looked for otherwise, best first.
        key: config key that asks for it.

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
