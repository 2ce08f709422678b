"""Runs training from start to end; pretraining and fine-tuning share it."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from mae_vit.config.load import dump_config
from mae_vit.core.errors import InputError, RemoteError, RemoteUnavailable
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.urls import redact_url
from mae_vit.runtime.failures import LostRank, RunInterrupted, TrainingFailed, is_lost_rank
from mae_vit.runtime.ranks import barrier, broadcast_from_rank_zero, run_on_rank_zero
from mae_vit.runtime.signals import StopRequest
from mae_vit.runtime.watchdog import Watchdog
from mae_vit.training.checkpoints.checkpoint import (
    BrokenCheckpoint,
    CheckpointInfo,
    list_checkpoints,
    newest_checkpoint,
    step_of,
    verify_checkpoint,
)
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines.base import Engine
from mae_vit.training.evals import Evals
from mae_vit.training.outputs.environment import describe_environment
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.run_outputs import RunOutputs
from mae_vit.training.recovery import Quarantine, Recovery
from mae_vit.training.setup import TrainingSetup
from mae_vit.training.trainer import Outcome, Trainer, restore

# Reason of a stop that another rank requested.
OTHER_RANK = "the request of another rank"


def run(
    setup: TrainingSetup,
    engine: Engine,
    folder: RunFolder,
    checkpoint: CheckpointInfo | None,
    plan_text: str = "",
) -> None:
    """Trains from `checkpoint`, or from the beginning, to the end or to a signal; `plan_text` is for `plan.txt`."""
    begun, start_step = time.monotonic(), checkpoint.step if checkpoint else 0
    run_on_rank_zero(folder.lock, engine.ranks)
    try:
        trainer = build_trainer(setup, engine, folder, checkpoint, plan_text)
        outcome, lines = _train(trainer, checkpoint)
    except RuntimeError as error:
        if is_lost_rank(error):
            raise LostRank(
                f"rank {engine.ranks.rank} lost the connection to another rank, which failed or was killed; "
                "see that rank's message. The last checkpoint is good"
            ) from None
        raise
    # All ranks leave together: when one exits, the launcher kills the others, even while they write.
    trainer.stop.end()
    barrier(engine.ranks)
    engine.close()
    if engine.ranks.rank == 0 and outcome.finished:
        here = f", {outcome.step - start_step} of them here" if checkpoint else ""
        print(f"done: {count_of(outcome.step, 'step')}{here} in {time.monotonic() - begun:.0f} s")
        print("\n".join([*lines, *trainer.outputs.files()]))
    elif engine.ranks.rank == 0:
        how = f"after saving; {folder.again} resumes"
        if not outcome.saved:
            saved = list_checkpoints(folder.checkpoints)
            how = f"and could not save it; {folder.again} resumes from step {step_of(saved[-1]) if saved else 0}"
        print(f"stopped at step {outcome.step}/{setup.plan.total_steps} {how}")
    if not outcome.finished:
        raise RunInterrupted(trainer.stop.reason or OTHER_RANK)


def build_trainer(
    setup: TrainingSetup, engine: Engine, folder: RunFolder, checkpoint: CheckpointInfo | None, plan_text: str
) -> Trainer:
    """Restores `checkpoint` and builds the trainer, in a locked run folder; collective. Raises InputError."""
    config, plan, ranks = setup.config, setup.plan, engine.ranks
    start_step = checkpoint.step if checkpoint else 0
    quarantine = Quarantine(
        folder.quarantine,
        ranks,
        share=config.data.damage_budget,
        samples=plan.num_samples,
        data_path=redact_url(config.data.path),
        start_step=start_step,
    )
    if quarantine.excess:
        raise InputError(quarantine.excess)
    try:
        best = restore(engine, checkpoint, folder) if checkpoint else None
    except BrokenCheckpoint as error:
        raise InputError(str(error)) from None
    run_on_rank_zero(lambda: _prepare_folder(setup, folder, checkpoint, plan_text), ranks)
    stop = StopRequest(folder.again)
    watchdog = Watchdog(config.run.hang_timeout_s, rank=ranks.rank)
    evals = Evals(
        engine, watchdog, held_out=setup.held_out(), probe=setup.probe(), selects=setup.selects, best=best
    )
    # A comparison reads these.
    facts = {
        "parameters": setup.costs.parameters,
        "epochs": plan.total_steps / plan.steps_per_epoch,
        "flops_per_step": setup.costs.flops_per_image * plan.effective_batch_size,
        **({"notes": list(plan.notes)} if plan.notes else {}),
    }
    damaged = quarantine.samples
    outputs = RunOutputs(config, plan, folder, ranks, start_step=start_step, facts=facts, damaged=damaged)
    saver = Saver(
        engine,
        folder.checkpoints,
        config.checkpoint,
        identity=setup.identity.values,
        every_steps=plan.checkpoint_every_steps,
        say=outputs.say,
        remote=folder.remote,
    )
    recovery = Recovery(
        config.guard,
        checkpoint,
        identity=setup.identity.values,
        folder=folder,
        samples_of=setup.samples_of,
        quarantine=quarantine,
        ranks=ranks,
        say=outputs.say,
    )
    source = f"starting from {setup.source}"
    if start_step and checkpoint:
        source = f"resuming from {checkpoint.path}"
    outputs.begin(start_step, source, setup.advice if evals.held_out is None else "")
    return Trainer(setup, engine, folder, evals, outputs, recovery, saver, stop, watchdog)


def _prepare_folder(
    setup: TrainingSetup, folder: RunFolder, checkpoint: CheckpointInfo | None, plan_text: str
) -> None:
    environment = describe_environment(sys.argv, setup.ranks.world_size)
    folder.create(dump_config(setup.config), environment, plan_text)
    own = folder.checkpoints
    if checkpoint is None and (newest := newest_checkpoint(own, warn=False)) and newest.step:
        raise InputError(f"another process has begun this run in {own.parent}; {folder.again} resumes it")
    if not folder.has(checkpoint):
        # What an earlier start here has left, which trained nothing. A rollback must not return to its checkpoint.
        for left in (folder.trackers, folder.metrics):
            left.unlink(missing_ok=True)
        for left in (folder.incidents, folder.pictures, folder.tensorboard):
            shutil.rmtree(left, ignore_errors=True)
        for untrained in (path for path in list_checkpoints(own) if step_of(path) == 0):
            shutil.rmtree(untrained)
    for path in list_checkpoints(own):
        if step_of(path) > (checkpoint.step if checkpoint else 0):
            # A full disk would otherwise keep a broken one, as the last, and not the one to resume from.
            try:
                verify_checkpoint(path)
            except BrokenCheckpoint:
                shutil.rmtree(path, ignore_errors=True)
    # Fails now if a URL cannot be written, not at the first save.
    folder.upload()


def _train(trainer: Trainer, checkpoint: CheckpointInfo | None) -> tuple[Outcome, list[str]]:
    """Trains, writes the results, and returns lines about them. The summary states how it ended, also by an error."""
    ranks = trainer.ranks
    try:
        with trainer.watchdog:
            outcome = trainer.fit(checkpoint)
        # Writing results has no time limit.
        return outcome, _end(trainer, outcome)
    except BaseException as error:
        trainer.saver.close()
        trainer.outputs.end("failed", None)
        # Without the other ranks, another node may run it by now: what is behind a URL is no longer this rank's.
        if ranks.rank == 0 and not is_lost_rank(error):
            try:
                trainer.folder.upload()
            except OSError as problem:
                trainer.outputs.say(f"warning: {error_reason(problem)}")
        raise


def _end(trainer: Trainer, outcome: Outcome) -> list[str]:
    """Writes the results, and returns lines about them; a disk error fails all ranks together."""
    folder, outputs, ranks = trainer.folder, trainer.outputs, trainer.ranks
    problem: Exception | None = None
    results, write, lines = dict[str, Any](), None, list[str]()
    if outcome.finished:
        best = trainer.evals.best
        results, write, lines = trainer.setup.finish(trainer.engine, folder, outcome.step, best)
    try:
        if write is not None and ranks.rank == 0:
            write()
        trainer.saver.close()
        if not outcome.finished:
            outputs.say(f"stopping on {trainer.stop.reason or OTHER_RANK}")
        outputs.end("done" if outcome.finished else "interrupted", outcome.step, results)
        if ranks.rank == 0:
            folder.upload()
    except RemoteError as error:
        if outcome.finished:
            kind = RemoteUnavailable if isinstance(error, RemoteUnavailable) else TrainingFailed
            problem = kind(f"{error}; the last state is saved, and {folder.again} resumes")
        else:
            outputs.say(f"warning: {error}")
    except OSError as error:
        problem = TrainingFailed(
            f"results cannot be written to {folder.path}: {error_reason(error)}; the last state is saved. "
            f"Make room, then {folder.again} resumes"
        )
    if problem := broadcast_from_rank_zero(problem, ranks):
        raise problem
    return lines
