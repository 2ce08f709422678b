"""Whether ranks meet, and are alike: checks before a run."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch

from mae_vit.training.distributed import Ranks, gather_objects
from mae_vit.training.health import Check

# What ranks exchange, and how the data are read, depends on these.
_COMPARED = ("mae-vit", "torch", "torchvision", "timm", "deepspeed", "numpy", "simplejpeg", "pillow")
_JOIN_TIMEOUT_S = 60.0
_EXCHANGED_BYTES = 64 << 20


def check_ranks(ranks: Ranks, device: torch.device, *, timeout_s: float = _JOIN_TIMEOUT_S) -> Check:
    """Joins all ranks and lets them exchange something; the process group stays."""
    if ranks.world_size == 1:
        return Check("ok", "ranks", "one rank: nobody to join")
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=timedelta(seconds=timeout_s),
                rank=ranks.rank,
                world_size=ranks.world_size,
            )
        values = torch.ones(_EXCHANGED_BYTES // 4, device=device)
        torch.distributed.all_reduce(values[:1])
        begun = time.monotonic()
        torch.distributed.all_reduce(values)
        total = float(values.mean())
        rate = _EXCHANGED_BYTES / (time.monotonic() - begun) / 1e9
    except (RuntimeError, OSError, ValueError) as error:
        said = str(error).strip().splitlines()[0][:200]
        return Check(
            "FAIL",
            "ranks",
            f"rank {ranks.rank} on {socket.gethostname()} did not meet the {ranks.world_size - 1} others at {address} "
            f"within {timeout_s:.0f} s: {said}: are all started, and may the nodes reach that address and port?",
        )
    if total != ranks.world_size:
        return Check(
            "FAIL",
            "ranks",
            f"{ranks.world_size} ranks add up to {total:g}: the network changes data",
        )
    return Check("ok", "ranks", f"{ranks.world_size} ranks met at {address}, and add {rate:.2f} GB/s")


def versions() -> dict[str, str]:
    """What must be equal on all ranks."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_versions(ranks: Ranks) -> Check:
    """Compares the versions of all ranks, which must have joined; collective."""
    told: list[tuple[str, dict[str, str]]] = gather_objects((socket.gethostname(), versions()), ranks)
    differing = []
    for name in told[0][1]:
        by_version: dict[str, list[str]] = {}
        for rank, (host, found) in enumerate(told):
            by_version.setdefault(found[name], []).append(f"rank {rank} on {host}")
        if len(by_version) > 1:
            parts = [f"{version} ({_some(who)})" for version, who in by_version.items()]
            differing.append(f"{name} {', '.join(parts)}")
    if differing:
        return Check("FAIL", "versions", f"differ: {'; '.join(differing)}: install the same on all nodes")
    return Check("ok", "versions", ", ".join(f"{name} {version}" for name, version in told[0][1].items()))


def _some(who: Sequence[str]) -> str:
    return who[0] if len(who) == 1 else f"{who[0]} and {len(who) - 1} more"


def gathered(checks: Iterable[Check], ranks: Ranks) -> list[Check]:
    """Returns this rank's findings, and those of other ranks that are not well; collective."""
    own = list(checks)
    all_told: list[Any] = gather_objects([(c.status, c.name, c.text) for c in own], ranks)
    said = {(c.name, c.text) for c in own}
    for rank, told in enumerate(all_told):
        for status, name, text in told:
            if status != "ok" and (name, text) not in said:
                said.add((name, text))
                own.append(Check(status, name, f"rank {rank}: {text}"))
    return own
