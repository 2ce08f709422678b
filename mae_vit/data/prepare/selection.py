"""Chooses samples by lists, shares and limits, with hashes of the samples' keys.

A draw depends only on the key, not on the order of files or on other classes. Shares are nested: 1/10 is part of 1/3.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path, PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import SUBSET_HASH
from mae_vit.core.messages import closest, error_reason
from mae_vit.core.user_files import read_text, split_named
from mae_vit.data.batches.subset import first_by_hash
from mae_vit.data.prepare.entries import Entry, ImageSource
from mae_vit.data.shards.dataset_json import Processing

HOLDOUT_SPLIT = "val"
# Results on these are compared: they stay whole unless a list names their samples by path.
MEASURED = ("val", "test")
_HOLDOUT_HASH = b"mae-vit holdout"
_NEAREST_OF = 10_000


@dataclass(frozen=True)
class Selection:
    """The selection options of `prepare`.

    Attributes:
        subset: a text file of keys, paths or file names, one a line.
        holdout: share of train that becomes the split "val".
        fraction: share of the remaining samples.
        limit_per_class: largest number of samples of each class.
        extra: images without labels, with keys of their own, that join train after all else.
    """

    subset: Path | None = None
    holdout: Fraction | None = None
    fraction: Fraction | None = None
    limit_per_class: int | None = None
    extra: Sequence[ImageSource] = ()

    def apply(self, splits: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """Returns the chosen entries by split, in the given order.

        The order is subset, holdout, fraction, limit: the held-out samples depend on neither fraction nor limit.

        Raises:
            InputError: if the list names an unknown image, or no image remains.
        """
        taken = _listed(splits, self.subset) if self.subset else dict(splits)
        if self.holdout is not None:
            if "train" not in taken or HOLDOUT_SPLIT in taken:
                raise InputError(
                    f"--holdout draws {HOLDOUT_SPLIT} from train, but there is {', '.join(taken)}; leave it out"
                )
            train, held_out = draw_holdout(taken["train"], self.holdout, HOLDOUT_SPLIT)
            if not held_out:
                largest = max(Counter(entry.class_name for entry in train).values(), default=0)
                raise InputError(
                    f"--holdout {self.holdout} is less than one image of each class (the largest has {largest}); "
                    "give a larger share, or --no-labels to draw from all together"
                )
            taken |= {"train": train, HOLDOUT_SPLIT: held_out}
        for split in taken:
            if split not in MEASURED:
                taken[split] = self._subsample(taken[split], split)
        if self.extra:
            if "train" not in taken:
                raise InputError(
                    f"--unlabeled adds to split train, but there is {', '.join(taken)}; leave it out"
                )
            taken["train"] = [*taken["train"], *(entry for source in self.extra for entry in source.entries)]
        return taken

    def names(self, sources: Mapping[str, str]) -> dict[str, str]:
        """Returns the name of the source of each split that `apply` returns, given those of the splits before."""
        names = dict(sources)
        if self.holdout is not None:
            names[HOLDOUT_SPLIT] = names["train"]
        if self.extra:
            names["train"] = " + ".join(
                dict.fromkeys([names["train"], *(source.name for source in self.extra)])
            )
        return names

    def note(self, split: str, *, whole: bool) -> Processing:
        """Returns the record of the selection for a split; `whole` if all of the split's samples were taken."""
        cut = split not in MEASURED
        return Processing(
            subset=self.subset.name if self.subset and not whole else None,
            fraction=str(self.fraction) if self.fraction and cut else None,
            limit_per_class=self.limit_per_class if cut else None,
            holdout=str(self.holdout) if self.holdout and split in ("train", HOLDOUT_SPLIT) else None,
        )

    def _subsample(self, entries: list[Entry], split: str) -> list[Entry]:
        if self.fraction is not None:
            share = self.fraction
            # At least one image of each class, however small the share.
            entries = _first_by_hash(entries, lambda count: math.ceil(share * count), SUBSET_HASH)
        if self.limit_per_class is not None:
            limit = self.limit_per_class
            if all(entry.class_name is None for entry in entries):
                raise InputError(
                    f'--limit-per-class needs labels, which split "{split}" lacks; use --fraction'
                )
            entries = _first_by_hash(entries, lambda count: limit, SUBSET_HASH)
        return entries


def draw_holdout(entries: Sequence[Entry], share: Fraction, split: str) -> tuple[list[Entry], list[Entry]]:
    """Draws a rounded share of each class, but never all of it; returns (the rest, the drawn entries as `split`)."""
    drawn = _first_by_hash(
        entries, lambda count: min(math.floor(share * count + Fraction(1, 2)), count - 1), _HOLDOUT_HASH
    )
    keys = {entry.key for entry in drawn}
    left = [entry for entry in entries if entry.key not in keys]
    return left, [replace(entry, split=split) for entry in drawn]


def _first_by_hash(entries: Sequence[Entry], quota: Callable[[int], int], salt: bytes) -> list[Entry]:
    keys, classes = [entry.key for entry in entries], [entry.class_name for entry in entries]
    return [entries[place] for place in first_by_hash(keys, classes, quota, salt)]


def _listed(splits: dict[str, list[Entry]], path: Path) -> dict[str, list[Entry]]:
    """Takes the entries that a file lists; those of val and test only by paths that name the split."""
    try:
        lines = read_text(path, errors="surrogateescape").splitlines()
    except OSError as error:
        raise InputError(f"--subset {path}: {error_reason(error)}") from None
    wanted = dict.fromkeys(line.strip().removeprefix("./") for line in lines if line.strip())
    chosen: dict[str, set[str]] = defaultdict(set)
    by_file_name: dict[str, list[tuple[str, str]]] = defaultdict(list)
    known = set()
    for split, entries in splits.items():
        for entry in entries:
            names = [name for name in _names(entry, wide=split not in MEASURED) if name in wanted]
            if names:
                known.update(names)
                chosen[split].add(entry.key)
            file_name = PurePosixPath(entry.path).name
            if split not in MEASURED and file_name in wanted:
                by_file_name[file_name].append((split, entry.key))
    for name in sorted(set(by_file_name) - known):
        samples = by_file_name[name]
        if len(samples) > 1:
            raise InputError(f'--subset {path}: "{name}" fits {len(samples)} images; give paths')
        known.add(name)
        chosen[samples[0][0]].add(samples[0][1])
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        paths = [entry.path for entries in splits.values() for entry in entries[:_NEAREST_OF]]
        hint = closest(missing[0], paths) if missing and len(paths) <= _NEAREST_OF else ""
        first = f', first "{missing[0]}"' if missing else ""
        hint = hint or "give keys or paths"
        raise InputError(
            f"--subset {path}: {len(missing)} of {len(wanted)} lines match no sample{first}; {hint}"
        )
    return {
        split: [entry for entry in entries if entry.key in chosen[split]] if chosen[split] else entries
        for split, entries in splits.items()
        if chosen[split] or split in MEASURED
    }


def _names(entry: Entry, wide: bool) -> Iterable[str]:
    """Returns the names that a list may use for an entry: its path; if `wide`, also key and path below the split."""
    parts = PurePosixPath(entry.path).parts
    # Paths from the split's folder on: the folders above wrap the whole source.
    at = next((i for i, part in enumerate(parts[:-1]) if split_named(part)), None)
    names = {entry.path}
    if at is not None:
        names.add("/".join(parts[at:]))
    if wide:
        names |= {entry.key, "/".join(parts[at + 1 :] if at is not None else parts[-2:])}
    return names
