"""Recovery of a run: rolls back bad steps and lists damaged samples."""

from __future__ import annotations

from collections.abc import Callable

from mae_vit.config.schema import GuardSection
from mae_vit.runtime.collectives import barrier
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.recovery.guard import Guard
from mae_vit.training.recovery.quarantine import Quarantine
from mae_vit.training.recovery.rollback import Rollback
from mae_vit.training.step_report import StepValues

# Largest number of warnings about damaged samples that a process prints.
_MAX_WARNINGS = 10


class Recovery:
    """Guard, rollback and quarantine of a run. Every method must be called on every rank.

    Attributes:
        guard: checks steps, and keeps the loss history.
        quarantine: collects the damaged samples.
    """

    def __init__(
        self,
        options: GuardSection,
        history: LossHistory,
        *,
        rollback: Rollback,
        quarantine: Quarantine,
        ranks: Ranks,
        mend: str,
        say: Callable[[str], None],
    ) -> None:
        """Continues from `history`; `mend` is a sentence that says how to repair damaged samples."""
        self._options, self._rollback, self.quarantine = options, rollback, quarantine
        self.guard, self._ranks, self._mend, self._say = Guard(options, history), ranks, mend, say
        self._warnings = 0

    def check(self, step: int, values: StepValues) -> None:
        """Checks the values of a step, counted from 1, which are the same on all ranks.

        Raises:
            BadStep: if the step is not finite, or if it completes a spike.
            TrainingFailed: if more samples are damaged than allowed.
        """
        if values.damaged:
            self._sync_damage()
        # A step that fp16 skipped changed no weights.
        if not values.skipped:
            self.guard.check(step, values.loss, values.grad_norm)

    def go_back(self, bad: BadStep) -> CheckpointInfo:
        """Chooses the checkpoint to resume from after a bad step and restarts the guard there; collective.

        Raises:
            TrainingFailed: on all ranks, if there is no checkpoint before it, or after too many tries.
        """
        checkpoint, history = self._rollback.choose_checkpoint(bad, self.guard.course)
        self.guard = Guard(self._options, history)
        return checkpoint

    def _sync_damage(self) -> None:
        """Shares new damaged samples with all ranks, lists and prints them; raises TrainingFailed above the budget."""
        new, quarantine = self.quarantine.exchange(), self.quarantine
        for damage in new:
            self._warn(f"warning: another image takes the place of {damage}")
        if quarantine.exceeded:
            # Wait until rank 0 has written the list: when a rank exits, the launcher kills the others.
            barrier(self._ranks)
            raise TrainingFailed(
                f"{len(quarantine.samples):,} of {quarantine.total:,} samples are damaged, "
                f"data.damage_budget={quarantine.share:g} allows {quarantine.allowed:,}: {quarantine.path} lists "
                f"them. {self._mend}"
            )

    def _warn(self, line: str) -> None:
        self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            self._say(line)
            if self._warnings == _MAX_WARNINGS:
                self._say(f"further damaged samples: see {self.quarantine.path}")
