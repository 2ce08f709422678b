"""Checks before a run: can ranks communicate, and are they equal?"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.pretraining.doctor.machine_checks import Check
from mae_vit.runtime.collectives import gather_objects
from mae_vit.runtime.meeting import meet
from mae_vit.runtime.process_group import join
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.outputs.environment import versions_of

# Versions that ranks must share: collectives and data reading depend on them.
_COMPARED = ("mae-vit", "torch", "torchvision", "timm", "deepspeed", "numpy", "simplejpeg", "pillow")
_JOIN_TIMEOUT_S = 60.0
# Joined, they wait for each other's data folders.
_CHECK_TIMEOUT_S = 1800.0
_EXCHANGED_BYTES = 64 << 20


def join_ranks(ranks: Ranks, device: torch.device | None, *, timeout_s: float = _JOIN_TIMEOUT_S) -> Check:
    """Joins all ranks as a run does; the process group stays.

    Ranks whose devices differ, or that have none (None), join by the CPU, to say so.
    """
    if ranks.world_size == 1:
        return Check("ok", "ranks", "one rank: no others to connect to")
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = meet(ranks, timeout=timedelta(seconds=timeout_s))
        store.set(f"doctor/{ranks.rank}", device.type if device else "none")
        kinds = {store.get(f"doctor/{rank}") for rank in range(ranks.world_size)}
        join(
            ranks,
            device if device and len(kinds) == 1 else torch.device("cpu"),
            timeout=timedelta(seconds=_CHECK_TIMEOUT_S),
            store=store,
        )
    except (RuntimeError, InputError) as error:
        return Check(
            "FAIL", "ranks", f"rank {ranks.rank} on {socket.gethostname()}: {error_reason(error)[:400]}"
        )
    return Check("ok", "ranks", f"{ranks.world_size} ranks met at {address}")


def check_exchange(ranks: Ranks, device: torch.device) -> Check:
    """Lets ranks that have met add numbers, as gradients are; collective."""
    if ranks.world_size == 1:
        return Check("ok", "network", "one rank: nothing to exchange")
    kinds: list[tuple[str, str]] = gather_objects((device.type, socket.gethostname()), ranks)
    if len(dict(kinds)) > 1:
        devices = ", ".join(f"{kind} (on {host})" for kind, host in dict(kinds).items())
        return Check("FAIL", "network", f"ranks have different devices: {devices}")
    try:
        torch.distributed.all_reduce(torch.ones(1, device=device))
        values = torch.ones(_EXCHANGED_BYTES // 4, device=device)
        begun = time.monotonic()
        torch.distributed.all_reduce(values)
        right = bool((values == ranks.world_size).all())
        rate = _EXCHANGED_BYTES / (time.monotonic() - begun) / 1e9
    except RuntimeError as error:
        return Check(
            "FAIL", "network", f"ranks cannot add their numbers: {str(error).strip().splitlines()[0][:200]}"
        )
    if not right:
        return Check("FAIL", "network", f"{ranks.world_size} ranks do not add up: the network changes data")
    return Check("ok", "network", f"ranks add {rate:.2f} GB/s on {device.type}")


def check_versions(ranks: Ranks) -> Check:
    """Compares the versions of all ranks, which must have joined; collective."""
    versions = {"python": platform.python_version(), **versions_of(_COMPARED)}
    by_rank: list[tuple[str, dict[str, str]]] = gather_objects((socket.gethostname(), versions), ranks)
    differing = []
    for name in by_rank[0][1]:
        by_version: dict[str, list[str]] = {}
        for rank, (host, its_versions) in enumerate(by_rank):
            by_version.setdefault(its_versions[name], []).append(f"rank {rank} on {host}")
        if len(by_version) > 1:
            parts = [f"{version} ({_some(who)})" for version, who in by_version.items()]
            differing.append(f"{name} {', '.join(parts)}")
    if differing:
        return Check("FAIL", "versions", f"differ: {'; '.join(differing)}: install the same on all nodes")
    return Check("ok", "versions", ", ".join(f"{name} {version}" for name, version in by_rank[0][1].items()))


def _some(who: Sequence[str]) -> str:
    return who[0] if len(who) == 1 else f"{who[0]} and {len(who) - 1} more"


def merge_checks(checks_here: Sequence[Check], ranks: Ranks) -> list[Check]:
    """Returns rank 0's findings, and those of other ranks that are not well; collective."""
    by_rank: list[list[Check]] = gather_objects(list(checks_here), ranks)
    checks = list(by_rank[0])
    said = {(check.name, check.text) for check in checks}
    for rank, rank_checks in enumerate(by_rank):
        for check in rank_checks:
            if check.status != "ok" and (check.name, check.text) not in said:
                said.add((check.name, check.text))
                checks.append(Check(check.status, check.name, f"rank {rank}: {check.text}"))
    return checks
