"""Before a run's first step: its folder, its ranks, and where it starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mae_vit.config.command_line import Arguments
from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.runtime.collectives import broadcast_from_rank_zero, gather_objects, run_on_rank_zero
from mae_vit.runtime.ranks import Ranks
from mae_vit.runtime.slurm import is_requeued_run
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo
from mae_vit.training.checkpoints.resume import Identity, find_checkpoint, set_aside
from mae_vit.training.engines.build import enable_determinism, init_process_group
from mae_vit.training.outputs.run_folder import RunFolder


def check_engine(config: Config, ranks: Ranks) -> None:
    """Refuses what the engine has no use for on so many ranks.

    Raises:
        InputError: naming the option.
    """
    compression = config.train.compress_gradients
    if compression != "none" and ranks.world_size == 1:
        raise InputError(
            f'train.compress_gradients="{compression}" has no effect on one process, which sends no gradients'
        )


def open_run_folder(config: Config) -> RunFolder:
    """Names the run's folder and makes sure that it can be written: asked by all ranks, refused by all.

    Raises:
        InputError: naming the folder.
    """
    folder = RunFolder(Path(config.run.dir or Path("runs") / config.run.name))
    folder.check_writable()
    return folder


def resume_or_start(
    config: Config,
    arguments: Arguments,
    folder: RunFolder,
    identity: Identity,
    ranks: Ranks,
    device: torch.device,
    *,
    saves: bool = True,
) -> CheckpointInfo | None:
    """Joins the ranks and finds the checkpoint that the run goes on from; None for a fresh start.

    Args:
        config: of the run.
        arguments: of the command line.
        folder: of the run.
        identity: what must not have changed since it was begun.
        ranks: of the run.
        device: of this rank.
        saves: whether such a run leaves checkpoints.

    Raises:
        InputError: if it cannot go on.
    """
    if config.run.deterministic:
        enable_determinism()
    init_process_group(config, device, ranks)
    check_ranks_agree(identity, ranks)
    # Before any rank looks for checkpoints: another process may still be writing one.
    lock_run_folder(folder, ranks, new=False)
    resume = arguments.resume
    own = ranks.rank == 0 and is_requeued_run(folder.path)
    if resume == "never" and broadcast_from_rank_zero("own" if own else None, ranks):
        resume = "auto"

    def make_room() -> None:
        if moved := set_aside(folder):
            print(f"moved the earlier run {folder.path} to {moved}")
            folder.unlock()

    if resume == "never":
        run_on_rank_zero(make_room, ranks)

    def choose() -> CheckpointInfo | None:
        found = find_checkpoint(folder, resume, identity, extend=arguments.extend)
        if saves and found is None and folder.read_status() == "done":
            raise InputError(
                f"{folder.path} holds a finished run that left no checkpoints to go on from: give this one another "
                "run.name, or --resume never to move that aside"
            )
        return found

    return run_on_rank_zero(choose, ranks)


def check_ranks_agree(identity: Identity, ranks: Ranks) -> None:
    """Makes sure that all ranks are about to do the same; collective.

    Raises:
        InputError: on all ranks, naming what differs: data of which one node has another copy, say.
    """
    told = gather_objects((socket.gethostname(), identity.values), ranks)
    host, own = told[0]
    for rank, (other_host, other) in enumerate(told):
        for key in own.keys() | other.keys():
            if own.get(key) != other.get(key):
                raise InputError(
                    f"ranks are about to do different things: {key} is {own.get(key)} on rank 0 ({host}), "
                    f"{other.get(key)} on rank {rank} ({other_host})"
                )


def lock_run_folder(folder: RunFolder, ranks: Ranks, *, new: bool) -> None:
    """Takes the run folder for this run, with `new` one that is not there yet too; collective.

    Raises:
        InputError: on all ranks, if another process keeps it.
    """
    run_on_rank_zero(lambda: folder.lock() if new or folder.path.exists() else None, ranks)


@contextmanager
def run_folder_locked(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Keeps the run folder, which is made if need be, for this run; collective at its beginning.

    Raises:
        InputError: on all ranks, if another process keeps it.
    """
    lock_run_folder(folder, ranks, new=True)
    try:
        yield
    finally:
        folder.unlock()


def check_length(folder: RunFolder, found: CheckpointInfo | None, plan: Plan) -> None:
    """Refuses to go on with a run that has done more than it is to do.

    Raises:
        InputError: naming both lengths.
    """
    if found is not None and found.step > plan.total_steps:
        raise InputError(
            f"{folder.path} is at step {found.step}, beyond the {plan.total_steps} that it is to have: "
            "a run is only extended to a greater length"
        )


def is_finished(folder: RunFolder, found: CheckpointInfo | None, plan: Plan, ranks: Ranks) -> bool:
    """Whether a run has nothing left to do; collective.

    Raises:
        InputError: if it has done more than it is to do.
    """
    check_length(folder, found, plan)
    if found is None or found.step < plan.total_steps:
        return False
    return broadcast_from_rank_zero(folder.read_status(), ranks) == "done"
