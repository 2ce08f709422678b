"""This process's rank, under `python`, `deepspeed`, `torchrun` and `srun`."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch

from mae_vit.core.errors import InputError
from mae_vit.runtime.cores import cores_of_rank


@dataclass(frozen=True)
class Ranks:
    """This process's rank among all.

    Attributes:
        rank: 0..world_size-1.
        world_size: processes of the run.
        local_rank: rank on this node; chooses the GPU.
        local_world_size: processes on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def cores(self) -> int:
        """Cores that this rank may use, at least one; its own share of what the ranks of the node have."""
        return cores_of_rank(world_size=self.world_size, local_world_size=self.local_world_size)


ALONE = Ranks()
REMEDY = "; RANK and WORLD_SIZE are set: unset them to run one process"
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
    """Reads this process's rank from the launcher's environment; without a launcher, a world of one.

    Sets RANK, WORLD_SIZE and LOCAL_RANK, since DeepSpeed reads them.

    Raises:
        InputError: if the environment is incomplete.
    """
    ranks = _read_environment()
    if not 0 <= ranks.rank < ranks.world_size:
        raise InputError(f"rank {ranks.rank} is none of {ranks.world_size} ranks{REMEDY}")
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
    for marker, (rank, world_size, local_rank, local_world_sizes) in _LAUNCHERS:
        if marker not in os.environ:
            continue
        try:
            own_rank, total, own_local_rank = (
                int(os.environ[name]) for name in (rank, world_size, local_rank)
            )
            local = next((os.environ[name] for name in local_world_sizes if name in os.environ), "1")
            # Slurm writes "2(x3)" for three nodes of two tasks each.
            return Ranks(own_rank, total, own_local_rank, int(local.split("(")[0].split(",")[0]))
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{marker} is set, but the launcher's environment is incomplete: {error}: unset {marker} to run one "
                "process"
            ) from None
    return Ranks()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def choose_threads(ranks: Ranks) -> tuple[int, str]:
    """Returns how many threads a rank computes with on a CPU, and why: as it is told, else one for each core."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if told == "1" and ranks.local_world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        # Torchrun sets it where nobody does, so that ranks that know nothing of each other do not overload the node.
        return ranks.cores, "one for each core of the rank"
    if told.isdecimal() and int(told):
        # On a machine that others use too, threads that wait for one another spin; a caller knows what is free.
        return int(told), "OMP_NUM_THREADS"
    if (told_torch := torch.get_num_threads()) < ranks.cores:
        return told_torch, "as torch is set"
    return ranks.cores, "one for each core of the rank"


def share_weights(model: torch.nn.Module, ranks: Ranks) -> None:
    """Gives all ranks rank 0's parameters and buffers of a model that has the same ones everywhere; collective."""
    if ranks.world_size > 1:
        for tensor in model.state_dict().values():
            torch.distributed.broadcast(tensor, src=0)
