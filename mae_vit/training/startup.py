"""Startup of a run: device, folder, ranks, precision, and the checkpoint that it resumes from.

Precedence: the run's own checkpoints, then an explicit checkpoint, then scratch.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Literal, TypeVar

import torch

from mae_vit.config.command_line import Arguments
from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError, RemoteError
from mae_vit.core.files import check_not_current
from mae_vit.data.batches.prefetch import fetch_split
from mae_vit.models.sizes import SIZES
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks, broadcast_from_rank_zero, gather_objects, run_on_rank_zero
from mae_vit.runtime.slurm import is_requeued_run
from mae_vit.training.checkpoints.checkpoint import (
    STATE,
    BrokenCheckpoint,
    CheckpointInfo,
    list_checkpoints,
    newest_checkpoint,
    verify_checkpoint,
)
from mae_vit.training.engines.build import (
    enable_determinism,
    init_process_group,
)
from mae_vit.training.engines.precision import Chosen, Precision, choose_precision, fixed
from mae_vit.training.identity import PRECISION, Identity, check_identity
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.trackers import check_installed
from mae_vit.training.setup import Setup, TrainingSetup


def _find_checkpoint(
    folder: RunFolder, arguments: Arguments, identity: Identity, *, warn: bool = True, fetched: bool = True
) -> CheckpointInfo | None:
    """Returns the checkpoint that the run resumes from; None for a fresh start. Raises InputError.

    That of a run with a URL is only described if it is not `fetched`; raises RemoteError, too.
    """
    resume, extend = arguments.resume, arguments.extend
    if resume == "never":
        return None
    try:
        if folder.remote and not fetched:
            checkpoint = folder.remote.newest()
        else:
            checkpoint = newest_checkpoint(folder.checkpoints, warn=warn)
    except (BrokenCheckpoint, InputError) as error:
        raise InputError(f"{folder.shown(error)}; {folder.otherwise}") from None
    # The run's own checkpoint of step 0 holds no training, so an explicit checkpoint takes precedence.
    untrained = checkpoint is None or checkpoint.step == 0
    if isinstance(resume, Path):
        if checkpoint is None or untrained:
            checkpoint, untrained = _find_explicit(resume, warn=warn), False
        elif warn and resume.resolve() not in (folder.path.resolve(), checkpoint.path.resolve()):
            print(f"note: --resume {resume} is not used: the run has gone on; for it, give a new run.dir")
    if checkpoint is None or (untrained and identity.differing_keys(checkpoint.identity, extend=extend)):
        return None  # start again, with the new config
    place, otherwise = folder.shown(checkpoint.path), folder.otherwise
    check_identity(checkpoint.identity, identity, place, otherwise=otherwise, extend=extend)
    return checkpoint


def _find_explicit(path: Path, *, warn: bool) -> CheckpointInfo:
    """Returns the checkpoint at `path`, or the newest intact one if it is a run folder; else raises InputError."""
    if (path / STATE).exists():
        try:
            return verify_checkpoint(path)
        except BrokenCheckpoint as error:
            raise InputError(f"--resume {error}") from None
    for folder in (path / "checkpoints", path):
        if newest := newest_checkpoint(folder, warn=warn):
            return newest
    what = "is not a folder" if not path.is_dir() else "has no checkpoint (step-NNNNNNNN with state.json)"
    raise InputError(f"--resume {path} {what}; give a run folder or a checkpoint")


C = TypeVar("C", bound=Config)
S = TypeVar("S", bound=Setup)
T = TypeVar("T", bound=TrainingSetup)
# From this size on, training on a CPU core takes years.
_LARGE = SIZES["Ti"]


def begin(
    setup: T, arguments: Arguments, folder: RunFolder
) -> tuple[T, Chosen, CheckpointInfo | None] | None:
    """Joins the ranks of a run that trains, and finds the checkpoint to resume from; collective.

    Returns:
        The setup with the run's precision, this precision, and the checkpoint, None for a fresh start. The result is
        None if the run is finished.

    Raises:
        InputError: if the run cannot resume, or if the checkpoint has another identity.
    """
    data, plan, ranks = setup.data, setup.plan, setup.ranks
    fetch_split(data.index, data.source, data.order, say=ranks.local_rank == 0)
    checkpoint = resume_or_start(setup, arguments, folder)
    _check_length(folder, checkpoint, plan)
    all_steps = checkpoint is not None and checkpoint.step == plan.total_steps
    if all_steps and broadcast_from_rank_zero(folder.read_status(), ranks) == "done":
        return None
    return *settle(setup, checkpoint), checkpoint


def settle(setup: S, checkpoint: CheckpointInfo | None) -> tuple[S, Chosen]:
    """Resolves `train.precision` in the setup; returns it and the precision; collective."""
    chosen = agree_on_precision(setup.config.train.precision, setup.device, setup.ranks)
    setup, chosen = settle_precision(setup, checkpoint, chosen)
    if setup.ranks.rank == 0:
        print(f"precision: {chosen}")
    return setup, chosen


def choose_device(config: Config, ranks: Ranks) -> torch.device:
    """Returns the rank's device; raises InputError for too few GPUs, or a large model in a Slurm job without any."""
    device = find_device(ranks, config.run.device)
    size = getattr(config.model, "size", None)
    large = size is not None and size.embed_dim >= _LARGE.embed_dim and size.depth >= _LARGE.depth
    # sbatch without options gives one CPU core.
    if large and device.type == "cpu" and config.run.device == "auto" and "SLURM_JOB_ID" in os.environ:
        raise InputError(
            f"this Slurm job has no GPU for model.name={config.model.name}; request one with sbatch "
            "--gpus-per-node=1 --cpus-per-task=12 ..., or train with run.device=cpu"
        )
    return device


def as_array_task(config: C) -> C:
    """Gives each task of a Slurm array its own seed, name and folder (slurm/pretrain.sh, finetune.sh)."""
    task = os.environ.get("MAE_VIT_ARRAY_TASK")
    if not task:
        return config
    run = config.run
    values = {"seed": run.seed + int(task), "name": f"{run.name}-{task}"}
    if run.dir is not None:
        values["dir"] = f"{run.dir.rstrip('/')}-{task}"
    return config.model_copy(update={"run": run.model_copy(update=values)})


def open_run_folder(config: Config) -> RunFolder:
    """Returns the run's folder; raises InputError if it cannot be written or a tracker is not installed."""
    check_installed(config.monitor.trackers)
    folder = RunFolder.from_config(config)
    folder.check_writable()
    return folder


def note_of_run_around(arguments: Arguments, config: Config) -> list[str]:
    """Says how to resume a moved run: its config lies in a run folder that differs from this job's."""
    named = {override.partition("=")[0] for override in arguments.overrides} & {"run.name", "run.dir"}
    folder = RunFolder.from_config(config)
    if named or not isinstance(arguments.config, Path):
        return []
    run = arguments.config.parent
    if not list_checkpoints(run / "checkpoints") or run.resolve() == folder.path.resolve():
        return []
    return [
        f"this run's folder is {folder.shown()}; {quote(f'run.dir={run}')} resumes the run around {arguments.config}"
    ]


def resume_or_start(
    setup: Setup, arguments: Arguments, folder: RunFolder, *, saves: bool = True
) -> CheckpointInfo | None:
    """Joins the ranks and returns the checkpoint to resume from, None for a fresh start; or raises InputError."""
    ranks, identity = setup.ranks, setup.identity
    if arguments.resume == "never":
        folder.again += " without --resume never"
    if setup.config.run.deterministic:
        enable_determinism()
    init_process_group(setup.config, setup.device, ranks)
    _check_ranks_agree(identity, ranks)
    # Lock before any rank looks for checkpoints: another process may still write one.
    run_on_rank_zero(lambda: folder.lock() if folder.remote or folder.path.exists() else None, ranks)

    def choose() -> CheckpointInfo | None:
        asked = arguments
        if folder.remote:
            print(f"{folder.remote.shown} has a local copy while the run trains: {folder.path}")
            folder.remote.fetch()
        if asked.resume == "never" and is_requeued_run(folder.path):
            asked = replace(asked, resume="auto")
        if asked.resume == "never":
            _check_never(folder)
            if folder.remote and (folder.read_status() or list_checkpoints(folder.checkpoints)):
                raise InputError(f"--resume never: {folder.shown()} has a run; {folder.otherwise}")
            folder.replaces = folder.remote is None and folder.is_run
        checkpoint = _find_checkpoint(folder, asked, identity)
        if saves and checkpoint is None:
            check_resumable(folder, extend=arguments.extend)
        return checkpoint

    return run_on_rank_zero(choose, ranks)


def agree_on_precision(asked: Precision | Literal["auto"], device: torch.device, ranks: Ranks) -> Chosen:
    """Resolves `train.precision`; "auto" is fp32 on all ranks if it is fp32 on any; collective."""
    by_rank: list[Chosen] = gather_objects(choose_precision(asked, device), ranks)
    return next((chosen for chosen in by_rank if chosen.precision == "fp32"), by_rank[0])


def settle_precision(setup: S, checkpoint: CheckpointInfo | None, chosen: Chosen) -> tuple[S, Chosen]:
    """Replaces "auto" in the config by `chosen`, or by the checkpoint's precision; returns the choice too."""
    config = setup.config
    if checkpoint is not None and config.train.precision == "auto":
        chosen = fixed(checkpoint.identity[PRECISION], "auto: as the run began", setup.device)
    train = config.train.model_copy(update={"precision": chosen.precision})
    return replace(setup, config=config.model_copy(update={"train": train})), chosen


def check_resumable(folder: RunFolder, *, extend: bool) -> None:
    """Raises InputError for a run without checkpoints that is finished or is to be extended."""
    if folder.read_status() == "done":
        raise InputError(
            f"{folder.shown()} has a finished run without checkpoints to resume from; {folder.otherwise}"
        )
    if extend:
        raise InputError(
            f"--extend: {folder.shown()} has no checkpoint to resume from; give the run's folder as run.dir=FOLDER"
        )


def foresee_start(
    setup: TrainingSetup, arguments: Arguments, folder: RunFolder
) -> tuple[CheckpointInfo | None, str]:
    """Finds where a run would begin, without changing its folder: the checkpoint, and a problem (empty if none).

    A dry run trains nothing, so a folder that belongs to another run is a problem, not raised. Raises InputError if an
    explicit checkpoint does not match.
    """
    try:
        folder.foresee()
        checkpoint = _find_checkpoint(
            folder, arguments, setup.identity, warn=setup.ranks.rank == 0, fetched=False
        )
        _check_length(folder, checkpoint, setup.plan)
        if arguments.resume == "never":
            _check_never(folder)
        elif checkpoint is None:
            check_resumable(folder, extend=arguments.extend)
    except RemoteError as error:
        return None, str(error)
    except InputError as error:
        if isinstance(arguments.resume, Path) and not list_checkpoints(folder.checkpoints):
            raise
        return None, str(error)
    return checkpoint, folder.describe_user()


def _check_never(folder: RunFolder) -> None:
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise InputError(
            "--resume never would start over at every restart by torchrun; leave it out, and give a new run.dir"
        )
    if folder.is_run:
        check_not_current(folder.path)


def describe_start(folder: RunFolder, checkpoint: CheckpointInfo | None, plan: Plan, weights: str) -> str:
    """Describes where a run begins, for its plan; `weights` describes the initial weights."""
    if checkpoint is None:
        return f"from {weights}"
    if checkpoint.step == plan.total_steps and folder.read_status() == "done":
        return f"is finished (step {checkpoint.step}), nothing is left to train"
    return f"resumes from {folder.shown(checkpoint.path)} (step {checkpoint.step})"


def _check_ranks_agree(identity: Identity, ranks: Ranks) -> None:
    """Raises InputError on all ranks if one has other inputs, such as another copy of the data; collective."""
    by_rank = gather_objects((socket.gethostname(), identity.values), ranks)
    host, on_rank_0 = by_rank[0]
    for rank, (other_host, other) in enumerate(by_rank):
        for key in on_rank_0.keys() | other.keys():
            if on_rank_0.get(key) != other.get(key):
                raise InputError(
                    f"ranks differ in {key}: {on_rank_0.get(key)} on rank 0 ({host}), {other.get(key)} on rank "
                    f"{rank} ({other_host}); give all the same"
                )


def _check_length(folder: RunFolder, checkpoint: CheckpointInfo | None, plan: Plan) -> None:
    if checkpoint is not None and checkpoint.step > plan.total_steps:
        raise InputError(
            f"{folder.shown()} is at step {checkpoint.step}, beyond the {plan.total_steps} of its config; give more"
        )
