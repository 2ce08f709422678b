"""Lets the ranks of a run meet and join the process group, and reports which ranks are missing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason, format_duration
from mae_vit.runtime.ranks import REMEDY, Ranks
from mae_vit.runtime.signals import is_local_rank_zero
from mae_vit.runtime.watchdog import PATIENCE

# Ranks of one node rarely start further apart than this. Our choice.
_FIRST_WORD_S, _NEXT_WORD_S = 3.0, 30.0
_POLL_S = 0.05
_MOST_NAMED = 8
# Count of this process's meetings: a store may outlive a meeting, so each needs its own keys.
_meetings = 0


def meet(ranks: Ranks, *, timeout: timedelta) -> torch.distributed.Store:
    """Waits at MASTER_ADDR:MASTER_PORT until all ranks have arrived; returns the store that they share.

    Prints the missing ranks after some seconds, and then repeatedly. `timeout` applies to the meeting, and to each
    later wait for a key of the store. Raises InputError if a rank does not arrive in time.
    """
    global _meetings
    _meetings += 1
    host, text = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (text.isdecimal() and 0 < int(text) < 2**16):
        raise InputError(f'MASTER_PORT="{text}" is not a port; give a number from 1 to 65535')
    port = int(text)
    wait = _Wait(f"{host}:{port}", timeout.total_seconds())
    shared = torch.distributed.PrefixStore("mae-vit", _open_store(ranks, host, port, wait, timeout))
    try:
        name = _agree_on_name(shared, ranks, wait) if _is_served_by_launcher() else f"{_meetings}"
        store = torch.distributed.PrefixStore(name, shared)
        if store.add(f"here/{ranks.rank}", 1) > 1:
            raise InputError(f"two processes at {wait.address} have RANK={ranks.rank}; give each its own")
        missing = list(range(ranks.world_size)) if ranks.rank == 0 else []
        while not store.check(["all"]):
            missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
            for asked in (f"asked/{rank}" for rank in missing):
                if shared.check([asked]):
                    shared.set(shared.get(asked).decode(), name)
            if ranks.rank > 0:
                wait.pause(f"the ranks that rank 0 at {wait.address} lists", speak=False)
            elif missing:
                here = f"{ranks.world_size - len(missing)} of {ranks.world_size} here"
                more = f" and {len(missing) - _MOST_NAMED:,} more" if len(missing) > _MOST_NAMED else ""
                named = f"{', '.join(map(str, missing[:_MOST_NAMED]))}{more}"
                noun = "rank" if len(missing) == 1 else "ranks"
                wait.pause(f"{ranks.world_size} ranks at {wait.address}, {here}, missing {noun} {named}")
            else:
                store.set("all", "")
    except torch.distributed.DistError as error:
        raise InputError(
            f"rank 0 at {wait.address} left before all ranks arrived ({error_reason(error)}); see its output"
        ) from None
    return store


def _is_served_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agree_on_name(shared: torch.distributed.Store, ranks: Ranks, wait: _Wait) -> str:
    """Returns a name for this meeting's keys, the same on all ranks: rank 0 invents it, the others ask for it.

    torchrun's store outlives restarts of the ranks, so it has keys of earlier meetings. The count of restarts does not
    tell meetings apart: each node counts its own, and none that a node's coming or leaving causes.
    """
    name = uuid4().hex
    if ranks.rank > 0:
        question = name
        shared.set(f"asked/{ranks.rank}", question)
        while not shared.check([question]):
            wait.pause(f"rank 0 at {wait.address}", speak=is_local_rank_zero())
        name = shared.get(question).decode()
    return name


class _Wait:
    """Prints repeatedly what this rank waits for, and gives up after a timeout."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._begun, self._next = time.monotonic(), _FIRST_WORD_S

    @property
    def over(self) -> bool:
        """Whether the timeout has passed."""
        return time.monotonic() - self._begun > self._timeout_s

    def pause(self, whom: str, *, speak: bool = True) -> None:
        """Waits a moment; prints if it is time and `speak` is set; raises InputError after the timeout."""
        waited_s = time.monotonic() - self._begun
        since = format_duration(waited_s)
        if self.over:
            raise InputError(
                f"waited {since} for {whom}; start every rank, with a MASTER_ADDR and MASTER_PORT that it can reach"
                + REMEDY
            )
        if speak and waited_s > self._next:
            self._next = waited_s + _NEXT_WORD_S
            print(f"waiting for {whom}, since {since}{REMEDY}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def _open_store(
    ranks: Ranks, host: str, port: int, wait: _Wait, timeout: timedelta
) -> torch.distributed.TCPStore:
    def store_at(host: str, *, serves: bool) -> torch.distributed.TCPStore:
        return torch.distributed.TCPStore(
            host, port, ranks.world_size, serves, timeout, wait_for_workers=False, multi_tenant=serves
        )

    # PyTorch's launchers serve a store themselves.
    if ranks.rank == 0 and not _is_served_by_launcher():
        try:
            return store_at("localhost", serves=True)
        except torch.distributed.DistError as error:
            raise InputError(
                f"rank 0 cannot listen at {wait.address} ({error_reason(error)}); choose another MASTER_PORT{REMEDY}"
            ) from None
    answers: list[torch.distributed.TCPStore | Exception] = []
    why = "no answer yet"

    def find() -> None:
        nonlocal why
        # torch prints a stack for each failed attempt, so wait until something answers.
        while not wait.over:
            try:
                socket.create_connection((host, port), timeout=_NEXT_WORD_S).close()
                break
            except OSError as error:
                why = error_reason(error)
                time.sleep(10 * _POLL_S)
        else:
            return
        why = "another program answers"
        try:
            answers.append(store_at(host, serves=False))
        except Exception as error:
            answers.append(error)

    # In a thread: if a stranger listens at the port, torch waits for ever and ignores Ctrl-C.
    threading.Thread(target=find, daemon=True, name="meeting").start()
    while not answers:
        wait.pause(f"rank 0 at {wait.address} ({why})", speak=is_local_rank_zero())
    if isinstance(answers[0], Exception):
        raise InputError(f"no rank 0 at {wait.address} ({error_reason(answers[0])}){REMEDY}")
    return answers[0]


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
    """Creates the process group of all ranks, which `meet` if no store is given; collective. Raises InputError.

    `device` is that of this rank's collectives; `timeout` the longest time for joining, and for each collective.
    """
    global _timeout
    _timeout = timeout
    if store is None:
        # A single rank ignores the address that another job may have left in the environment.
        store = meet(ranks, timeout=timeout) if ranks.world_size > 1 else torch.distributed.HashStore()
    bound: dict[str, Any] = {}
    # Bind to the device: otherwise NCCL guesses it from the rank at the first collective. A single
    # rank has no peer, and DeepSpeed leaves it unbound, too.
    if device.type == "cuda" and ranks.world_size > 1:
        store.set(f"gpu/{ranks.rank}", str(torch.cuda.get_device_properties(device).uuid))
        first = ranks.rank - ranks.local_rank
        gpus = {store.get(f"gpu/{rank}") for rank in range(first, first + ranks.local_world_size)}
        # On all ranks of the node; NCCL would end in a traceback.
        if len(gpus) < ranks.local_world_size:
            raise InputError(
                f"{ranks.local_world_size} ranks on this node share {count_of(len(gpus), 'GPU')}; start one for each "
                "GPU"
            )
        bound["device_id"] = device
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        rank=ranks.rank,
        world_size=ranks.world_size,
        store=store,
        **bound,
    )


def group_as_patient() -> torch.distributed.ProcessGroup:
    """Creates a second group of all ranks with the timeout of the first (torch's default is 10 minutes); collective."""
    group = torch.distributed.new_group(timeout=_timeout)
    assert isinstance(group, torch.distributed.ProcessGroup)  # all ranks are of it
    return group


def leave() -> None:
    """Closes the process group, if there is one; call it after the last collective of all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
