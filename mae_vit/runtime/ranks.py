"""This process's rank, under `python`, `deepspeed`, `torchrun` and `srun`, and collective calls over all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mae_vit.core.errors import InputError, RemoteUnavailable
from mae_vit.core.messages import error_reason
from mae_vit.runtime.cores import cores_of_rank, tasks_of_node


@dataclass(frozen=True)
class Ranks:
    """This process's rank among all.

    Attributes:
        local_rank: rank on this node; chooses the GPU.
        local_world_size: number of processes on this node.
        under_deepspeed: the `deepspeed` launcher started this process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    under_deepspeed: bool = False

    @property
    def cores(self) -> int:
        """Number of cores that this rank may use, at least one."""
        return cores_of_rank(world_size=self.world_size, local_world_size=self.local_world_size)


ALONE = Ranks()
REMEDY = ". RANK and WORLD_SIZE are set; unset them to run one process"


def find_ranks() -> Ranks:
    """Reads this process's rank from the launcher's environment; without a launcher, a world of one.

    Sets RANK, WORLD_SIZE and LOCAL_RANK, which DeepSpeed reads. Raises InputError if the environment is incomplete.
    """
    ranks = _read_environment()
    if not 0 <= ranks.rank < ranks.world_size:
        raise InputError(f"RANK={ranks.rank} must be below WORLD_SIZE={ranks.world_size}{REMEDY}")
    if ranks.world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError(
            f"{ranks.world_size} ranks need MASTER_ADDR and MASTER_PORT (slurm/pretrain.sh sets them for srun)"
            + REMEDY
        )
    os.environ |= {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
    }
    return ranks


def _read_environment() -> Ranks:
    environ = os.environ
    if "RANK" in environ:
        marker, names = "RANK", ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        on_node = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", "1"))
    # A task of srun; a plain process in an allocation sees SLURM_PROCID too.
    elif "SLURM_STEP_ID" in environ:
        marker, names = "SLURM_STEP_ID", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        on_node = str(tasks_of_node())
    else:
        return Ranks()
    try:
        rank, world_size, local_rank = (int(environ[name]) for name in names)
        local_world_size = int(on_node)
    except (KeyError, ValueError):
        raise InputError(
            f"{marker} is set, but not all of {', '.join(names)} are numbers; unset {marker} to run one process"
        ) from None
    # deepspeed/launcher/launch.py sets CROSS_SIZE, the number of nodes; torchrun and srun do not.
    return Ranks(rank, world_size, local_rank, local_world_size, under_deepspeed="CROSS_SIZE" in environ)


def free_port() -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def choose_threads(ranks: Ranks) -> tuple[int, str]:
    """Returns a rank's number of CPU threads, and why: as configured, else one for each core."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if told == "1" and ranks.local_world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun sets 1 by default, so that ranks do not overload the node; we know each rank's cores.
        return ranks.cores, "one for each core of the rank"
    if told.isdecimal() and int(told):
        # On a shared machine waiting threads waste time by spinning; the user knows how many cores are free.
        return int(told), "OMP_NUM_THREADS"
    if (told_torch := torch.get_num_threads()) < ranks.cores:
        return told_torch, "as torch is set"
    return ranks.cores, "one for each core of the rank"


def share_weights(model: torch.nn.Module, ranks: Ranks) -> None:
    """Broadcasts rank 0's parameters and buffers to the same model on all ranks; collective."""
    if ranks.world_size > 1:
        for tensor in model.state_dict().values():
            torch.distributed.broadcast(tensor, src=0)


T = TypeVar("T")


def sum_over_ranks(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Adds a tensor over ranks, in place."""
    if ranks.world_size > 1:
        torch.distributed.all_reduce(values)
    return values


def broadcast_from_rank_zero(value: T, ranks: Ranks) -> T:
    """Broadcasts rank 0's value to all ranks; collective."""
    if ranks.world_size == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def run_on_rank_zero(decide: Callable[[], T], ranks: Ranks) -> T:
    """Runs a function on rank 0 and broadcasts its result or error; collective.

    It serves decisions about files, because other nodes may see changes late. OSError becomes InputError, except
    RemoteUnavailable.
    """
    outcome: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            outcome[0] = decide()
        except (InputError, RemoteUnavailable) as error:
            outcome[1] = type(error), error.args
        except OSError as error:
            reason = ": ".join(filter(None, (error.filename and str(error.filename), error_reason(error))))
            outcome[1] = InputError, (reason,)
    outcome = broadcast_from_rank_zero(outcome, ranks)
    if outcome[1] is not None:
        kind, words = outcome[1]
        raise kind(*words)
    return outcome[0]


def gather_objects(value: Any, ranks: Ranks) -> list[Any]:
    """Returns each rank's value, on all ranks; collective."""
    if ranks.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def barrier(ranks: Ranks) -> None:
    """Waits for all ranks."""
    if ranks.world_size > 1:
        torch.distributed.barrier()
