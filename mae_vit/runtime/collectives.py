"""Collective calls over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.runtime.ranks import Ranks

T = TypeVar("T")


def sum_over_ranks(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Adds a tensor over ranks, in place."""
    if ranks.world_size > 1:
        torch.distributed.all_reduce(values)
    return values


def broadcast_from_rank_zero(text: str | None, ranks: Ranks) -> str | None:
    """Broadcasts rank 0's value to all ranks; collective."""
    if ranks.world_size == 1:
        return text
    box = [text]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def run_on_rank_zero(decide: Callable[[], T], ranks: Ranks) -> T:
    """Runs a function on rank 0 and broadcasts its result or error; collective.

    It serves decisions about files, because other nodes may see changes late.

    Raises:
        InputError: on all ranks, if `decide` raises InputError or OSError.
    """
    outcome: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            outcome[0] = decide()
        except InputError as error:
            outcome[1] = error.lines
        except OSError as error:
            outcome[1] = [
                ": ".join(filter(None, (error.filename and str(error.filename), error_reason(error))))
            ]
    if ranks.world_size > 1:
        torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise InputError(*outcome[1])
    result: T = outcome[0]
    return result


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
