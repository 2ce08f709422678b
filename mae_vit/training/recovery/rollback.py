"""Rolls a run back to its last good checkpoint and skips the data before the bad step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mae_vit.config.schema import GuardSection
from mae_vit.core.files import write_json
from mae_vit.data.order.order import data_step, skip
from mae_vit.runtime.collectives import run_on_rank_zero
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo, verify_checkpoint
from mae_vit.training.checkpoints.format import list_checkpoints, newest_before, step_of
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.outputs.run_folder import RunFolder

# Losses before the bad step that the incident report lists.
_LISTED_LOSSES = 32


@dataclass
class Rollback:
    """Rolls back to the same checkpoint at most `guard.max_rollbacks` times.

    Attributes:
        folder: run folder.
        options: number of tries, and data steps to skip; each further try skips twice as many.
        ranks: this process's place among all ranks.
        samples_of: describes the samples of a data step.
    """

    folder: RunFolder
    options: GuardSection
    ranks: Ranks
    samples_of: Callable[[int], list[dict[str, Any]]]
    _tries: dict[int, int] = field(default_factory=dict)

    def choose_checkpoint(self, bad: BadStep, course: LossHistory) -> tuple[CheckpointInfo, LossHistory]:
        """Chooses where to resume after a bad step, and writes an incident report; collective.

        Returns:
            The newest intact checkpoint from before the step, and the history to resume with.

        Raises:
            TrainingFailed: on all ranks, if there is no checkpoint before it, or after too many tries.
        """
        # Only rank 0 looks: on a network file system other nodes may see the folder with a delay.
        folder = self.folder.checkpoints
        checkpoint = run_on_rank_zero(lambda: newest_before(folder, bad.step, verify_checkpoint), self.ranks)
        if checkpoint is None:
            raise TrainingFailed(f"{bad}; there is no checkpoint from before it")
        tried = self._tries[checkpoint.step] = self._tries.get(checkpoint.step, 0) + 1
        culprit = data_step(bad.step - 1, course.skipped)
        width = self.options.skip_steps * 2 ** (tried - 1)
        first = max(data_step(checkpoint.step, course.skipped), culprit - width + 1)
        incident = {
            "step": bad.step,
            "reason": bad.reason,
            "loss": bad.loss,
            "grad_norm": bad.grad_norm,
            "losses_before": list(bad.losses[-_LISTED_LOSSES:]),
            "back_to_step": checkpoint.step,
            "try": tried,
            "of_tries": self.options.max_rollbacks,
            "data_step": culprit,
            "skipped_data_steps": [first, culprit + 1],
        }
        given_up = tried > self.options.max_rollbacks
        if self.ranks.rank == 0:
            self._report(incident, culprit, tried)
            # Later checkpoints come after the bad step or are broken.
            for path in list_checkpoints(folder):
                if step_of(path) > checkpoint.step:
                    shutil.rmtree(path, ignore_errors=True)
        if given_up:
            raise TrainingFailed(
                f"{bad}; tries from the checkpoint of step {checkpoint.step}: {tried - 1} of "
                f"guard.max_rollbacks={self.options.max_rollbacks}; see {self._path(bad.step, tried)}"
            )
        skipped = skip(course.skipped, first, culprit + 1)
        return checkpoint, LossHistory(skipped, checkpoint.course.losses)

    def _path(self, step: int, tried: int) -> Path:
        return self.folder.path / "incidents" / f"step-{step:08d}-{tried}.json"

    def _report(self, incident: dict[str, Any], culprit: int, tried: int) -> None:
        path = self._path(incident["step"], tried)
        with suppress(OSError):  # a full disk must not prevent the rollback
            path.parent.mkdir(exist_ok=True)
            write_json(path, {**incident, "samples": self.samples_of(culprit)})
