"""Recovery of a run: checks every step, rolls back bad ones, and lists damaged samples."""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mae_vit.config.schema import GuardSection
from mae_vit.core.errors import Damage, InputError, damage_allowed
from mae_vit.core.files import fsync_path, read_json_lines, to_json, write_atomically, write_json
from mae_vit.data.order.order import data_step, skip
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.ranks import Ranks, barrier, gather_objects, run_on_rank_zero
from mae_vit.training.checkpoints.checkpoint import (
    CheckpointInfo,
    list_checkpoints,
    newest_before,
    step_of,
    verify_checkpoint,
)
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.identity import LENGTH_KEYS
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.step_report import StepValues

_WINDOW = 256
# Fewer losses give no reliable estimate of the spread.
_ENOUGH = 128
# For a normal distribution: standard deviation = 1.4826 x median absolute deviation.
_SIGMA_PER_MAD = 1.4826
# Jumps in a row that are a spike: a single jump is only a hard batch.
_SPIKE_STEPS = 8
# Losses before the bad step that the incident report lists.
_LISTED_LOSSES = 32
# Largest number of warnings about damaged samples that a process prints.
_MAX_WARNINGS = 10


class Guard:
    """Detects steps that are not finite, and losses that jump and stay high. All ranks reach the same result.

    A loss jumps if it is more than `spike_sigmas` robust standard deviations above the median of the
    last 256 losses. Eight jumps in a row are a spike.
    """

    def __init__(self, options: GuardSection, course: LossHistory) -> None:
        self._options, self._skipped = options, course.skipped
        self._losses = deque(course.losses, maxlen=_WINDOW)
        self._streak = course.streak

    @property
    def course(self) -> LossHistory:
        """The loss history for the checkpoint."""
        return LossHistory(self._skipped, tuple(self._losses), self._streak)

    @property
    def no_suspects(self) -> bool:
        """Whether the latest step was good. If it jumped, it may be the start of a spike."""
        return self._streak == 0

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Checks a step, counted from 1: mean loss over the global batch, global gradient norm before clipping.

        Raises BadStep if the step is not finite, or if it completes a spike.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            reason = f"is not finite (loss {loss}, gradient norm {grad_norm})"
            raise BadStep(step, reason, loss, grad_norm, tuple(self._losses))
        bound = self._bound()
        if bound is None or loss <= bound:
            self._streak = 0
            self._losses.append(loss)
            return
        self._streak += 1
        if self._streak >= _SPIKE_STEPS:
            first = step - self._streak + 1
            reason = f"begins a spike (loss {loss:.4g} after {self._streak} steps above {bound:.4g})"
            raise BadStep(first, reason, loss, grad_norm, tuple(self._losses))

    def _bound(self) -> float | None:
        if self._options.spike_sigmas is None or len(self._losses) < _ENOUGH:
            return None
        middle = statistics.median(self._losses)
        mad = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + self._options.spike_sigmas * _SIGMA_PER_MAD * mad


# A line of `quarantine.jsonl`: the step that first needed a damaged sample, counted from 1, and the damage.
Entry = tuple[int, Damage]


class Quarantine:
    """The distinct damaged samples, equal on all ranks after `exchange`. Rank 0 writes the list.

    Of the `samples` in `data_path`, at most the `share` (0 to 1) may be damaged.
    """

    def __init__(
        self, path: Path, ranks: Ranks, *, share: float, samples: int, data_path: str, start_step: int
    ) -> None:
        """Loads the list of a resumed run, without entries after `start_step`, the optimizer steps done; collective.

        The run reads the samples of these entries again, unless they have been repaired.
        """
        self.path, self._share, self._total, self._ranks = path, share, samples, ranks
        self._data_path = data_path
        self._shared: dict[int, Entry] = {}
        # Only rank 0's node may have the folder.
        for line in run_on_rank_zero(lambda: read_json_lines(path) if path.exists() else [], ranks):
            # A line that a power cut tore, or that others wrote.
            with suppress(ValueError, TypeError, AttributeError, KeyError):
                step, damage = int(line.pop("step")), Damage(**line)
                if step <= start_step:
                    self._shared[damage.sample] = step, damage
        self._waiting: dict[int, Entry] = {}
        # A full disk must not end the run: `exchange` writes the list again.
        with suppress(OSError):
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
    def excess(self) -> str:
        """Says what to do if more samples are damaged than allowed; empty if not."""
        allowed = damage_allowed(self._share, self._total)
        if len(self._shared) <= allowed:
            return ""
        return (
            f"{len(self._shared):,} of {self._total:,} samples are damaged, data.damage_budget={self._share:g} allows "
            f"{allowed:,}; {self.path} lists them. Repair the shards (see `mae-vit check {self._data_path}`) or raise "
            "the budget, then resume"
        )

    def note(self, step: int, damages: Iterable[Damage]) -> int:
        """Records this rank's damaged samples of a step; returns how many are new to this rank."""
        known = self._waiting.keys() | self._shared.keys()
        new = {damage.sample: (step, damage) for damage in damages if damage.sample not in known}
        self._waiting |= new
        return len(new)

    def exchange(self) -> list[Damage]:
        """Shares the recorded samples with all ranks and writes them to the list; collective.

        Returns those that are new to the run, in an order (step, number) that does not depend on ranks.
        """
        gathered = [e for entries in gather_objects([*self._waiting.values()], self._ranks) for e in entries]
        self._waiting, new = {}, list[Entry]()
        for step, damage in sorted(gathered, key=lambda entry: (entry[0], entry[1].sample)):
            if damage.sample not in self._shared:
                self._shared[damage.sample] = step, damage
                new.append((step, damage))
        if new and self._ranks.rank == 0:
            first = not self.path.exists()
            # A full disk must not end the run: a resumed one finds these again.
            with suppress(OSError), self.path.open("ab") as file:
                file.write(_lines(new))
                file.flush()
                os.fsync(file.fileno())
            if first:
                fsync_path(self.path.parent)
        return [damage for _, damage in new]


def _lines(entries: Iterable[Entry]) -> bytes:
    lines = (to_json({"step": step, **asdict(damage)}) for step, damage in entries)
    return "".join(f"{line}\n" for line in lines).encode()


class Recovery:
    """Guard, rollback and quarantine of a run. Every method must be called on every rank."""

    def __init__(
        self,
        options: GuardSection,
        checkpoint: CheckpointInfo | None,
        *,
        identity: Mapping[str, Any],
        folder: RunFolder,
        samples_of: Callable[[int], list[dict[str, Any]]],
        quarantine: Quarantine,
        ranks: Ranks,
        say: Callable[[str], None],
    ) -> None:
        """Continues from `checkpoint`; `samples_of` describes the samples of a data step."""
        self._options, self._folder, self._samples_of = options, folder, samples_of
        self._identity = identity
        self.guard, self.quarantine = Guard(options, self._course(checkpoint)), quarantine
        self._ranks, self._say = ranks, say
        self._tries: dict[int, int] = {}
        self._warnings = 0

    def check(self, step: int, values: StepValues) -> None:
        """Checks the values of a step, counted from 1, which are the same on all ranks.

        Raises BadStep (`Guard.check`), or TrainingFailed if more samples are damaged than allowed.
        """
        if values.damaged:
            self._sync_damage()
        # A step that fp16 skipped changed no weights.
        if not values.skipped:
            self.guard.check(step, values.loss, values.grad_norm)

    def go_back(self, bad: BadStep) -> CheckpointInfo:
        """Chooses where to resume after a bad step, restarts the guard there, writes an incident report; collective.

        Returns:
            The newest intact checkpoint from before the step; at most `guard.max_rollbacks` times the same.

        Raises:
            TrainingFailed: on all ranks, if there is no checkpoint before it, or after too many tries.
            RemoteUnavailable: on all ranks, if the run's URL cannot be reached.
        """
        # Only rank 0 looks: on a network file system other nodes may see the folder with a delay.
        course = self.guard.course
        try:
            checkpoint = run_on_rank_zero(lambda: self._newest_before(bad.step), self._ranks)
        except InputError as error:
            raise TrainingFailed(f"{bad}; {error}") from None
        if checkpoint is None:
            raise TrainingFailed(f"{bad}; no checkpoint is from before it, so start over with a lower rate")
        tried = self._tries[checkpoint.step] = self._tries.get(checkpoint.step, 0) + 1
        culprit = data_step(bad.step - 1, course.skipped)
        # Each further try skips twice as many.
        width = self._options.skip_steps * 2 ** (tried - 1)
        first = max(data_step(checkpoint.step, course.skipped), culprit - width + 1)
        report = self._folder.incidents / f"step-{bad.step:08d}-{tried}.json"
        if self._ranks.rank == 0:
            incident = {
                "step": bad.step,
                "reason": bad.reason,
                "loss": bad.loss,
                "grad_norm": bad.grad_norm,
                "losses_before": list(bad.losses[-_LISTED_LOSSES:]),
                "back_to_step": checkpoint.step,
                "try": tried,
                "of_tries": self._options.max_rollbacks,
                "data_step": culprit,
                "skipped_data_steps": [first, culprit + 1],
            }
            with suppress(OSError):  # a full disk must not prevent the rollback
                report.parent.mkdir(exist_ok=True)
                write_json(report, {**incident, "samples": self._samples_of(culprit)})
            # Later checkpoints come after the bad step or are broken.
            for path in list_checkpoints(self._folder.checkpoints):
                if step_of(path) > checkpoint.step:
                    shutil.rmtree(path, ignore_errors=True)
        if tried > self._options.max_rollbacks:
            raise TrainingFailed(
                f"{bad}, after {tried - 1} of guard.max_rollbacks={self._options.max_rollbacks} from the "
                f"checkpoint of step {checkpoint.step}; see {report}"
            )
        skipped = skip(course.skipped, first, culprit + 1)
        self.guard = Guard(self._options, LossHistory(skipped, self._course(checkpoint).losses))
        return checkpoint

    def _course(self, checkpoint: CheckpointInfo | None) -> LossHistory:
        if checkpoint is None:
            return LossHistory()
        # With `--extend` the learning rate rises again, and the loss with it.
        extended = any(checkpoint.identity.get(key) != self._identity.get(key) for key in LENGTH_KEYS)
        return LossHistory(checkpoint.course.skipped) if extended else checkpoint.course

    def _newest_before(self, step: int) -> CheckpointInfo | None:
        folder, remote = self._folder.checkpoints, self._folder.remote
        found = newest_before(folder, step, verify_checkpoint)
        if found is None and remote is not None:
            # A run that resumed on this machine fetched the newest only.
            remote.fetch_before(step)
            found = newest_before(folder, step, verify_checkpoint)
        return found

    def _sync_damage(self) -> None:
        """Shares new damaged samples with all ranks, lists and prints them; raises TrainingFailed above the budget."""
        new, quarantine = self.quarantine.exchange(), self.quarantine
        for damage in new[: _MAX_WARNINGS - self._warnings]:
            self._say(f"warning: another image replaces {damage}")
            self._warnings += 1
            if self._warnings == _MAX_WARNINGS:
                self._say(f"for further damaged samples see {quarantine.path}")
        if quarantine.excess:
            # Wait until rank 0 has written the list: when a rank exits, the launcher kills the others.
            barrier(self._ranks)
            raise TrainingFailed(quarantine.excess)
