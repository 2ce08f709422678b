"""Opens the splits for training and for evaluation."""

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
    """Opens the index of a training split, even if some of its shards are missing or truncated; `say` warns of that.

    `damage_budget` is the share of its samples that may be lost.

    Raises:
        InputError: if more samples are lost, or the split does not exist.
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
    """Opens the index of a split that must be complete, as for evaluation.

    Raises:
        InputError: if a shard is missing or has another size, or the split does not exist.
    """
    index = open_index(folder, split, remote=remote)
    _, problems = _missing_samples(index)
    if problems:
        raise InputError(f'split "{split}" must be whole: {_shorten(problems, folder)}')
    return index


def check_held_out(index: ShardIndex, held_out: np.ndarray) -> None:
    """Rejects lost held-out images now rather than at the first evaluation.

    Raises:
        InputError: if any is lost, naming the first damaged shards.
    """
    missing, problems = _missing_samples(index)
    lost = np.intersect1d(missing, held_out)
    if len(lost):
        raise InputError(
            f"{len(lost)} of the {len(held_out):,} held-out images cannot be read: "
            f"{_shorten(problems, index.folder)}, mend the shards, or train on all (finetune.holdout=0)"
        )


def _missing_samples(index: ShardIndex) -> tuple[np.ndarray, list[str]]:
    """Returns the samples that local shards lack, judged by file size, and a message for each such shard."""
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
    """Chooses the split for evaluation: the `wanted` one, which need not exist, or the first of `known` that exists.

    `key` is the config key of the request.

    Raises:
        InputError: if the requested split is the training split.
    """
    others = [name for name in splits if name != training]
    if wanted == training:
        raise InputError(
            f'{key}="{wanted}" is what data.split trains on: give another split '
            f"({', '.join(sorted(others)) or 'there is none'})"
        )
    return wanted or next((name for name in known if name in others), None)
