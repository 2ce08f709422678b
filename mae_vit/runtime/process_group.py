"""Joins and leaves the process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from mae_vit.runtime.meeting import meet
from mae_vit.runtime.ranks import Ranks
from mae_vit.runtime.watchdog import PATIENCE

# Added to the watchdog's longest timeout: several long phases may follow one another, and nodes start
# minutes apart. Our choice.
MARGIN_S = 600.0
# Timeout of the latest process group.
_timeout: timedelta | None = None


def give_up_after(hang_timeout_s: float | None) -> timedelta:
    """Returns the timeout of collectives, for `run.hang_timeout_s`; a day if that is None.

    It exceeds the watchdog's, so that the watchdog names the rank that hangs.
    """
    if hang_timeout_s is None:
        return timedelta(days=1)
    return timedelta(seconds=PATIENCE * hang_timeout_s + MARGIN_S)


def join(
    ranks: Ranks, device: torch.device, *, timeout: timedelta, store: torch.distributed.Store | None = None
) -> None:
    """Creates the process group of all ranks; every rank calls it once.

    Args:
        ranks: this process's rank.
        device: device of this rank's collectives.
        timeout: longest time for joining, and for each collective.
        store: store from `meet`; None to meet at the launcher's MASTER_ADDR and MASTER_PORT.

    Raises:
        InputError: if a rank does not arrive in time.
    """
    global _timeout
    _timeout = timeout
    if store is None:
        # A single rank ignores the address that another job may have left in the environment.
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
    # Bind to the device: otherwise NCCL guesses it from the rank at the first collective. A single
    # rank has no peer, and DeepSpeed leaves it unbound, too.
    if ranks.world_size > 1:
        options["device_id"] = device
    torch.distributed.init_process_group("nccl", **options)


def group_as_patient() -> torch.distributed.ProcessGroup:
    """Creates a second group of all ranks with the timeout of the first; collective.

    torch would give it the default timeout, 10 minutes for NCCL.
    """
    group = torch.distributed.new_group(timeout=_timeout)
    assert isinstance(group, torch.distributed.ProcessGroup)  # all ranks are of it
    return group


def leave() -> None:
    """Closes the process group, if there is one; call it after the last collective of all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
