"""Joining and leaving the process group, for runs on every engine and for the doctor."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from mae_vit.runtime.meeting import meet
from mae_vit.runtime.ranks import Ranks
from mae_vit.runtime.watchdog import PATIENCE

# Beyond the watchdog's longest patience: phases that each stay within it may follow one another,
# and nodes do not start in the same minute. Ours.
MARGIN_S = 600.0
# Of the group that was joined last.
_timeout: timedelta | None = None


def give_up_after(hang_timeout_s: float | None) -> timedelta:
    """How long a collective waits: the watchdog, which names the rank that stands still, speaks first.

    Args:
        hang_timeout_s: `run.hang_timeout_s`; None, where nothing is watched, gives a day.
    """
    if hang_timeout_s is None:
        return timedelta(days=1)
    return timedelta(seconds=PATIENCE * hang_timeout_s + MARGIN_S)


def join(
    ranks: Ranks, device: torch.device, *, timeout: timedelta, store: torch.distributed.Store | None = None
) -> None:
    """Makes the process group of all ranks; every rank calls it once.

    Args:
        ranks: this process's place.
        device: device by which this rank exchanges numbers.
        timeout: longest time for joining, and for each collective.
        store: where ranks have met; None to meet at the launcher's MASTER_ADDR and MASTER_PORT.

    Raises:
        InputError: if not all ranks come in time.
    """
    global _timeout
    _timeout = timeout
    if store is None:
        # One rank meets nobody, whatever address another job left in the environment.
        store = meet(ranks, timeout=timeout) if ranks.world_size > 1 else torch.distributed.HashStore()
    options: dict[str, Any] = {
        "timeout": timeout,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "store": store,
    }
    if device.type != "cuda":
        torch.distributed.init_process_group("gloo", **options)
        return
    # Bound to its device: NCCL else guesses one by the rank's number at the first collective. One
    # single rank has no peer to reach (DeepSpeed leaves it unbound, too).
    if ranks.world_size > 1:
        options["device_id"] = device
    torch.distributed.init_process_group("nccl", **options)


def group_as_patient() -> torch.distributed.ProcessGroup:
    """Makes another group of all ranks, whose collectives wait as long as those of the first; collective.

    torch gives a new group its own default, of 10 minutes for NCCL.
    """
    group = torch.distributed.new_group(timeout=_timeout)
    assert isinstance(group, torch.distributed.ProcessGroup)  # all ranks are of it
    return group


def leave() -> None:
    """Closes the process group, if there is one: where all ranks have made their last collective call."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
