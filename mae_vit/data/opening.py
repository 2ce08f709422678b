"""What jobs need to open their data: normalization, order, number of workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.data.augment import Augment
from mae_vit.data.blocks import BlockOrder
from mae_vit.data.dataset import Dataset
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.index_rows import UNKNOWN_LABEL
from mae_vit.data.order import GlobalOrder, Order, RepeatedOrder
from mae_vit.data.policies import make_policy
from mae_vit.data.reading import MemorySource, Source
from mae_vit.data.remote.folder import RemoteFolder
from mae_vit.data.statistics import IMAGENET_MEAN, IMAGENET_STD
from mae_vit.errors import InputError, counted, damage_allowed
from mae_vit.keyed import MAX_INDEX

_MAX_AUTO_WORKERS = 16
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
    told = f'{lost:,} of {counted(len(index), "sample")} of split "{split}" cannot be read'
    where = f"{'; '.join(problems[:_NAMED])}{more}: see `mae-vit check {folder}`"
    if lost > allowed:
        raise InputError(
            f"{told}, data.damage_budget={damage_budget:g} allows {allowed:,}: {where}, mend the shards or raise "
            "the budget"
        )
    if say:
        budget = f"data.damage_budget={damage_budget:g} allows {allowed:,}"
        what = f"{told}; others take their places ({budget})" if lost else "a shard is not as described"
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
            f'labels of {counted(len(unknown), "sample")} of split "{index.split}" are lost, and samples are chosen '
            f"by them: {first}: mend it (see `mae-vit check {index.folder}`)"
        )


def make_order(
    index: ShardIndex,
    samples: np.ndarray | None = None,
    *,
    effective_batch_size: int,
    seed: int,
    lanes: int | None,
    block_shards: int | None,
    repeats: int = 1,
) -> Order:
    """Returns the order of a split's samples, or of some of them.

    Args:
        index: of the split.
        samples: sorted sample numbers; the order is then one of places in it.
        effective_batch_size: samples of a step.
        seed: the run's.
        lanes: of the order "blocks"; None for "global".
        block_shards: of the order "blocks".
        repeats: how often in a row each sample comes; divides the batch.

    Raises:
        InputError: if there are more views than numbers for them.
    """
    if repeats > 1:
        total = len(index) if samples is None else len(samples)
        if total * repeats > MAX_INDEX:
            raise InputError(
                f"data.repeats={repeats} of {total:,} images are over 2**32 views (nearest: {MAX_INDEX // total})"
            )
        once = make_order(
            index,
            samples,
            effective_batch_size=effective_batch_size // repeats,
            seed=seed,
            lanes=lanes,
            block_shards=block_shards,
        )
        return RepeatedOrder(once, repeats)
    if lanes is None or block_shards is None:
        total = len(index) if samples is None else len(samples)
        return GlobalOrder(total, effective_batch_size, seed)
    counts = [shard.samples for shard in index.split_info.shards]
    if samples is not None:
        # A shard of which nothing is taken is none.
        ends = np.cumsum(counts)
        taken = np.bincount(np.searchsorted(ends, samples, side="right"), minlength=len(counts))
        counts = [int(count) for count in taken if count]
    return BlockOrder(
        counts,
        effective_batch_size=effective_batch_size,
        seed=seed,
        lanes=lanes,
        block_shards=block_shards,
    )


def choose_workers(asked: int | str, source: Source, *, cores: int, on_gpu: bool, policies: bool) -> int:
    """Processes per rank, as asked; "auto": none where images lie in memory as they are, else its cores but one.

    Args:
        asked: `data.workers`.
        source: of the images.
        cores: of this rank.
        on_gpu: on a CPU the trainer keeps all cores busy itself.
        policies: images are changed by a policy: 0.1 ms for one of 32 px, too slow for one core beside a GPU.
    """
    if isinstance(asked, int):
        return asked
    if isinstance(source, MemorySource) and not (policies and on_gpu):
        return 0
    return auto_workers(cores, on_gpu=on_gpu)


def auto_workers(cores: int, *, on_gpu: bool) -> int:
    """Processes that decode: all cores but one, at least one beside a GPU, at most 16."""
    return min(_MAX_AUTO_WORKERS, max(1 if on_gpu else 0, cores - 1))


def find_split(
    splits: Iterable[str], *, wanted: str | None, own: str, known: Sequence[str], key: str
) -> str | None:
    """Names the split that is measured and not trained on.

    Args:
        splits: that there are.
        wanted: the one that is asked for, there or not.
        own: the one that is trained on.
        known: those looked for otherwise, best first.
        key: by which it is asked for.

    Returns:
        None where none is asked for, and none of the known ones is there.

    Raises:
        InputError: if it is the one that is trained on.
    """
    others = [name for name in splits if name != own]
    if wanted == own:
        raise InputError(
            f'{key}="{wanted}" is what data.split trains on: give another split '
            f"({', '.join(sorted(others)) or 'there is none'})"
        )
    return wanted or next((name for name in known if name in others), None)


def check_pad(crop: str, index: ShardIndex, img_size: tuple[int, int]) -> None:
    """Refuses a shifted crop of images that are not of the model's size.

    Raises:
        InputError: naming both sizes.
    """
    split = index.split_info
    stored = (split.height[0], split.width[0])
    if crop == "pad" and (stored != img_size or (split.height[1], split.width[1]) != img_size):
        height, width = (
            str(low) if low == high else f"{low}-{high}" for low, high in (split.height, split.width)
        )
        size = img_size[0] if img_size[0] == img_size[1] else list(img_size)
        raise InputError(
            f'data.augment.crop="pad" needs images of model.img_size={size}, but '
            f'split "{index.split}" holds {height} x {width} px: use data.augment.crop=random_resized'
        )


def normalization(
    choice: str | Sequence[Sequence[float]], dataset: Dataset, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Resolves `data.normalize` to per-channel mean and std of pixels in 0..1.

    Raises:
        InputError: if the statistics do not fit the channels.
    """
    if choice == "half":
        return (0.5,) * channels, (0.5,) * channels
    if not isinstance(choice, str):
        if len(choice) != 2 or any(len(part) != channels for part in choice) or min(choice[1]) <= 0:
            raise InputError(f"data.normalize={choice}: give [[{channels} means], [{channels} stds above 0]]")
        return tuple(choice[0]), tuple(choice[1])
    mean, std = tuple(dataset.mean), tuple(dataset.std)
    if choice == "imagenet":
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    if len(mean) == 1 and channels == 3:
        mean, std = mean * 3, std * 3
    if len(mean) != channels:
        raise InputError(
            f'data.normalize="{choice}" has {len(mean)} channels, model.in_chans={channels}: '
            f'give model.in_chans={len(mean)} if the images are to keep theirs, else data.normalize="half" or '
            "[[mean], [std]]"
        )
    # A channel of one value would divide by zero.
    return mean, tuple(max(value, 1e-3) for value in std)


def make_views(
    img_size: tuple[int, int],
    mean: Sequence[float],
    *,
    policy: str,
    policy_options: Mapping[str, Any],
    **options: Any,
) -> Augment:
    """Returns how training images are seen.

    Args:
        img_size: (H, W) in pixels.
        mean: of the pixels in 0..1, by channel: the color of what a policy moves in from outside.
        policy: of `mae_vit.data.policies`, or "none".
        policy_options: its own.
        options: of `Augment`.
    """
    chosen = make_policy(policy, **policy_options)
    return Augment(img_size=img_size, policy=chosen, fill=fill_color(mean), **options)


def fill_color(mean: Sequence[float]) -> tuple[int, ...]:
    """Returns the uint8 color nearest to a mean of pixels in 0..1 (timm's `img_mean`)."""
    return tuple(min(255, max(0, round(255 * value))) for value in mean)
