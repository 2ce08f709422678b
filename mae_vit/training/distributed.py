"""Who we are among the ranks, under `python`, `deepspeed`, `torchrun` and `srun` alike."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mae_vit.errors import InputError, reason_of
from mae_vit.machine import available_cores
from mae_vit.training.allocator import keep_freed_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place.

    Attributes:
        rank: 0..world_size-1.
        world_size: processes of the run.
        local_rank: place on this node; chooses the GPU.
        local_world_size: processes on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


# Each launcher's names for: rank, world size, local rank, local world size.
# SLURM_STEP_ID tells a task that srun started from a plain process in an allocation,
# which sees SLURM_PROCID too.
_LAUNCHERS = (
    ("RANK", ("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))),
    (
        "SLURM_STEP_ID",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE",)),
    ),
)


def find_ranks() -> Ranks:
    """Reads this process's place from the launcher's environment; alone if there is none.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT where the launcher
    does not, since DeepSpeed reads them.

    Raises:
        InputError: if the environment is incomplete.
    """
    ranks = _read_environment()
    environment = {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
    }
    if ranks.world_size == 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise InputError(
            f"{ranks.world_size} ranks need MASTER_ADDR and MASTER_PORT (slurm/pretrain.sh sets them for srun)"
        )
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    return ranks


def _read_environment() -> Ranks:
    for marker, (rank, world_size, local_rank, local_world_sizes) in _LAUNCHERS:
        if marker not in os.environ:
            continue
        try:
            place, total, local_place = (int(os.environ[name]) for name in (rank, world_size, local_rank))
            local = next((os.environ[name] for name in local_world_sizes if name in os.environ), "1")
            # Slurm writes "2(x3)" for three nodes of two tasks each.
            return Ranks(place, total, local_place, int(local.split("(")[0].split(",")[0]))
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{marker} is set, but the launcher's environment is incomplete: {error}"
            ) from None
    return Ranks()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def find_device(ranks: Ranks) -> torch.device:
    """Returns this rank's GPU, or the CPU where there is none; shares the node's cores.

    Raises:
        InputError: if the node has fewer GPUs than ranks.
    """
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        # A launcher may show each rank its own GPU alone.
        place = ranks.local_rank if count > 1 else 0
        if place >= count:
            raise InputError(f"local rank {ranks.local_rank} has no GPU: this node shows {count}")
        torch.cuda.set_device(place)
        return torch.device("cuda", place)
    keep_freed_memory()
    torch.set_num_threads(max(1, available_cores() // ranks.local_world_size))
    return torch.device("cpu")


def sum_over_ranks(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Adds a tensor over ranks, in place."""
    if ranks.world_size > 1:
        torch.distributed.all_reduce(values)
    return values


def from_rank_zero(text: str | None, ranks: Ranks) -> str | None:
    """Returns on all ranks what rank 0 hands in; collective."""
    if ranks.world_size == 1:
        return text
    box = [text]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def decided_by_rank_zero(decide: Callable[[], T], ranks: Ranks) -> T:
    """Lets rank 0 find or do something, and tells all ranks what came of it; collective.

    What lies on a disk is for one rank to say: another node may see it a moment late.

    Raises:
        InputError: on all ranks, if `decide` does, or if a file is not to be had.
    """
    told: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            told[0] = decide()
        except InputError as error:
            told[1] = str(error)
        except OSError as error:
            told[1] = ": ".join(filter(None, (error.filename and str(error.filename), reason_of(error))))
    if ranks.world_size > 1:
        torch.distributed.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise InputError(told[1])
    found: T = told[0]
    return found


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
