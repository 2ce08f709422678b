"""The files that an index is kept in: found again while the shards stay as they are, else made.

Of shards that are as `dataset.json` describes them it is one array, `SPLIT-FINGERPRINT.npy`.
Over damaged shards an array of another name is made, `SPLIT-FINGERPRINT-odd-STATE.npy`, with
notes of the damage beside it; it holds as long as those shards are as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.files import replacing
from mae_vit.core.progress import progress
from mae_vit.data.shards.dataset_json import Split
from mae_vit.data.shards.index_rows import ROW, ShardState, read_rows, state_of

_MAX_STATTED_SHARDS = 64
_NOTES = "-notes.json"


@dataclass
class Notes:
    """What is wrong with the shards of an index.

    Attributes:
        shards: state and problem (a predicate: "is missing") by number, of those that are not as described.
        samples: key (None if unknown) and reason by number, of samples whose shard alone does not
            say why they cannot be read.
    """

    shards: dict[int, tuple[ShardState, str]] = field(default_factory=dict)
    samples: dict[int, tuple[str | None, str]] = field(default_factory=dict)

    def hold(self, folder: Path, info: Split) -> bool:
        """Whether the shards are still what they were."""
        return all(
            state_of(folder / info.shards[number].file) == state for number, (state, _) in self.shards.items()
        )

    def name(self) -> str:
        """A name for this state of the shards."""
        states = [(number, *astuple(state)) for number, (state, _) in sorted(self.shards.items())]
        return f"odd-{hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]}"

    def dump(self) -> str:
        """Returns JSON."""
        shards = {number: [*astuple(state), problem] for number, (state, problem) in self.shards.items()}
        return json.dumps({"shards": shards, "samples": self.samples})


def read_notes(array_path: Path) -> Notes:
    """Reads the notes beside an array; none are beside that of whole shards.

    Raises:
        OSError: if they are gone.
        ValueError: if they are damaged.
    """
    if "-odd-" not in array_path.stem:
        return Notes()
    try:
        told = json.loads(_notes_path(array_path).read_text(encoding="utf-8"))
        return Notes(
            {
                int(number): (ShardState(size, mtime), problem)
                for number, (size, mtime, problem) in told["shards"].items()
            },
            {int(sample): (key, reason) for sample, (key, reason) in told["samples"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_notes_path(array_path)} is damaged: {error}") from None


def find_array(folder: Path, split: str, info: Split, plain: Path, *, tolerant: bool) -> Path:
    """Finds the array of a split, or makes it.

    Args:
        folder: of the shards.
        split: its name.
        info: what it should hold.
        plain: where the array of whole shards is kept.
        tolerant: take damaged shards too.

    Raises:
        InputError: if the shards are not as described, and that is not tolerated.
    """
    known = load_array(plain, info)
    if known is None and not tolerant:
        # Before all headers are read.
        _refuse(folder, info, suspect_shards(folder, info))
    suspects = list(range(len(info.shards)))
    if known is not None:
        suspects = suspect_shards(folder, info, plain)
        if not suspects:
            return plain
        if not tolerant:
            _refuse(folder, info, suspects)
    if tolerant and (kept := _kept_odd(folder, info, plain)) is not None:
        return kept
    begun = time.time_ns()
    rows, notes, newest = _read_shards(folder, info, known, suspects, tolerant)
    array_path = plain.with_name(f"{plain.stem}-{notes.name()}.npy") if notes.shards else plain
    if notes.shards:
        with replacing(_notes_path(array_path)) as partial:
            partial.write_text(notes.dump(), encoding="utf-8")
    # Clocks of file servers may run ahead.
    _write_array(array_path, rows, as_of_ns=max(begun, newest))
    _drop_others(plain, split, array_path)
    return array_path


def is_current(folder: Path, info: Split, plain: Path) -> bool:
    """Whether the array of whole shards is there, and no shard is seen to have changed since; writes nothing."""
    return load_array(plain, info) is not None and not suspect_shards(folder, info, plain)


def suspect_shards(folder: Path, info: Split, array_path: Path | None = None) -> list[int]:
    """Numbers the shards that are missing, of another size than described, or newer than their index.

    Looks at 64 evenly spread ones, and at all if one of these is suspect; `mae-vit check` reads them all.
    """
    since = array_path.stat().st_mtime_ns if array_path else None

    def suspect(number: int) -> bool:
        state = state_of(folder / info.shards[number].file)
        if state.bytes != info.shards[number].bytes or state.mtime_ns is None:
            return True
        return since is not None and state.mtime_ns > since

    # First and last among them: copies break off at the end.
    count = len(info.shards)
    chosen = np.linspace(0, count - 1, min(count, _MAX_STATTED_SHARDS)).astype(int).tolist()
    if not any(map(suspect, chosen)):
        return []
    return [number for number in range(count) if suspect(number)]


def _refuse(folder: Path, info: Split, suspects: list[int]) -> None:
    """Names the first shard that is missing or of another size."""
    for shard in (info.shards[number] for number in suspects):
        path = folder / shard.file
        size = state_of(path).bytes
        if size is None:
            raise InputError(f"shard {path} is missing: run `mae-vit check {folder}`")
        if size != shard.bytes:
            raise InputError(
                f"shard {path} has {size} bytes, dataset.json says {shard.bytes}: see `mae-vit check {folder}`"
            )


def load_array(path: Path, info: Split) -> np.ndarray | None:
    """Returns the array, if it exists and fits: a crash of the machine may leave an empty file."""
    try:
        rows = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        return None
    # An archive of arrays opens as something else.
    return (
        rows if isinstance(rows, np.ndarray) and rows.dtype == ROW and rows.shape == (info.samples,) else None
    )


def _kept_odd(folder: Path, info: Split, plain: Path) -> Path | None:
    """An array over shards that were as damaged as they are now."""
    for path in plain.parent.glob(f"{plain.stem}-odd-*{_NOTES}"):
        array_path = path.with_name(path.name.removesuffix(_NOTES) + ".npy")
        try:
            notes = read_notes(array_path)
        except (OSError, ValueError):
            continue
        if load_array(array_path, info) is None or not notes.hold(folder, info):
            continue
        if set(suspect_shards(folder, info, array_path)) <= set(notes.shards):
            return array_path
    return None


def _read_shards(
    folder: Path, info: Split, known: np.ndarray | None, suspects: list[int], tolerant: bool
) -> tuple[np.ndarray, Notes, int]:
    """Reads the headers of the suspect shards; of the others all is known.

    Returns:
        Rows, notes, and when the newest shard was changed (ns).
    """
    parts, notes, start, newest = [], Notes(), 0, 0
    asked = set(suspects)
    for number, shard in enumerate(
        progress(info.shards, desc="indexing", unit=" shards", delay=2, leave=False)
    ):
        path, before = folder / shard.file, None
        if known is not None:
            before = known[start : start + shard.samples]
        if before is not None and number not in asked:
            parts.append(before)
        else:
            read = read_rows(path, number, shard, before)
            newest = max(newest, read.state.mtime_ns or 0)
            if read.problem and not tolerant:
                raise InputError(f"shard {path} {read.problem}: see `mae-vit check {folder}`")
            if read.problem:
                notes.shards[number] = (read.state, read.problem)
                notes.samples |= {start + place: told for place, told in read.damaged.items()}
            parts.append(read.rows)
        start += shard.samples
    return np.concatenate(parts), notes, newest


def _write_array(path: Path, rows: np.ndarray, *, as_of_ns: int) -> None:
    """Writes rows that are of shards as they were at a time."""
    with replacing(path) as partial:
        with partial.open("wb") as file:
            np.save(file, rows)
        os.utime(partial, ns=(as_of_ns, as_of_ns))


def _notes_path(array_path: Path) -> Path:
    return array_path.with_name(array_path.stem + _NOTES)


def _drop_others(plain: Path, split: str, keep: Path) -> None:
    """Removes what was derived from earlier shards of this split, and from earlier damage."""
    for path in plain.parent.glob(f"{split}-*"):
        # "train-*" finds the files of a split "train-more" as well.
        own = re.match(rf"{re.escape(split)}-[0-9a-f]{{16}}[.-]", path.name)
        of_now = path.name.startswith(plain.stem)
        odd = "-odd-" in path.name and (keep == plain or not path.name.startswith(keep.stem))
        if own and (odd or not of_now):
            path.unlink(missing_ok=True)


def read_keys(path: Path, count: int) -> list[str] | None:
    """Reads the keys that are kept beside an index; None unless there are `count` of them."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, list) and len(found) == count:
            return found
    return None
