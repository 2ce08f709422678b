"""Collects the damaged samples of all ranks, lists them in `quarantine.jsonl`, and checks the budget."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mae_vit.core.errors import Damage, damage_allowed
from mae_vit.core.files import fsync_path, read_json_lines, to_json, write_atomically
from mae_vit.runtime.collectives import gather_objects
from mae_vit.runtime.ranks import Ranks


@dataclass(frozen=True)
class Entry:
    """A line of `quarantine.jsonl`.

    Attributes:
        step: the step that first needed the sample, counted from 1 as in `metrics.jsonl`.
        damage: the sample and the reason.
    """

    step: int
    damage: Damage


class Quarantine:
    """The distinct damaged samples, equal on all ranks after `exchange`. Rank 0 writes the list.

    Attributes:
        path: file of the list.
        share: largest allowed share of damaged samples, 0 to 1.
        total: number of training samples.
        allowed: largest allowed number of damaged samples.
    """

    def __init__(self, path: Path, ranks: Ranks, *, share: float, samples: int, start_step: int) -> None:
        """Loads the list of a resumed run, and drops entries after `start_step`, the optimizer steps done before.

        The run reads the samples of these entries again, unless they have been repaired.
        """
        self.path, self.share, self.total, self._ranks = path, share, samples, ranks
        self.allowed = damage_allowed(share, samples)
        kept = [entry for entry in _read(path) if entry.step <= start_step]
        self._shared = {entry.damage.sample: entry for entry in kept}
        self._waiting: dict[int, Entry] = {}
        if ranks.rank == 0 and path.exists():
            if self._shared:
                write_atomically(path, _lines(self._shared.values()))
            else:
                path.unlink()

    @property
    def samples(self) -> Collection[int]:
        """The numbers of all shared damaged samples."""
        return self._shared.keys()

    @property
    def exceeded(self) -> bool:
        """Whether there are more damaged samples than allowed."""
        return len(self._shared) > self.allowed

    def note(self, step: int, damages: Iterable[Damage]) -> int:
        """Records this rank's damaged samples of a step; returns how many are new to this rank."""
        waiting, shared = self._waiting, self._shared
        new = {
            d.sample: Entry(step, d) for d in damages if d.sample not in waiting and d.sample not in shared
        }
        self._waiting |= new
        return len(new)

    def exchange(self) -> list[Damage]:
        """Shares the recorded samples with all ranks and writes them to the list; collective.

        Returns:
            The samples that are new to the run, in an order (step, number) that does not depend on ranks.
        """
        gathered = [e for entries in gather_objects([*self._waiting.values()], self._ranks) for e in entries]
        self._waiting, new = {}, []
        for entry in sorted(gathered, key=lambda entry: (entry.step, entry.damage.sample)):
            if entry.damage.sample not in self._shared:
                self._shared[entry.damage.sample] = entry
                new.append(entry)
        if new and self._ranks.rank == 0:
            self._append(_lines(new))
        return [entry.damage for entry in new]

    def _append(self, data: bytes) -> None:
        first = not self.path.exists()
        with self.path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if first:
            fsync_path(self.path.parent)


def _lines(entries: Iterable[Entry]) -> bytes:
    lines = (to_json({"step": entry.step, **asdict(entry.damage)}) for entry in entries)
    return "".join(f"{line}\n" for line in lines).encode()


def _read(path: Path) -> list[Entry]:
    """Reads a list; skips a torn line, which a power cut can leave."""
    entries = []
    for line in read_json_lines(path) if path.exists() else ():
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            entries.append(Entry(int(line.pop("step")), Damage(**line)))
    return entries
