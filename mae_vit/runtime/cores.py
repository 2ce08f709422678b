"""The cores and control groups of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def cores_of_rank(*, world_size: int = 1, local_world_size: int = 1) -> int:
    """Returns the number of cores that one rank may use, at least one; by default for a single process.

    An srun task has its own affinity mask if Slurm binds tasks (task/affinity, task/cgroup), and the
    whole node's if not (task/none), so Slurm's variables limit it. Processes of one launcher, or of the node, share the
    launcher's mask (`local_world_size`).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing, on_node = local_world_size, _number("SLURM_CPUS_ON_NODE")
    if "SLURM_STEP_ID" in os.environ:
        tasks = tasks_of_node()
        # Ranks may be tasks, or processes of torchrun or deepspeed inside one task.
        sharing = min(local_world_size, world_size // (_number("SLURM_STEP_NUM_TASKS") or 1))
        if allotted := _number("SLURM_CPUS_PER_TASK"):
            cores = min(cores, allotted)
        elif on_node:
            cores = min(cores, on_node // tasks)
        else:
            cores //= tasks
    elif on_node:
        cores = min(cores, on_node)
    cores //= max(1, sharing)
    if (quota := cpu_quota()) is not None:
        # All ranks of the node may share the quota's control group.
        cores = min(cores, int(quota / local_world_size))
    return max(1, cores)


@contextmanager
def without_cores(share: float) -> Iterator[None]:
    """Takes a share (0 to 1) of this thread's cores away within the context; processes started in it stay off them.

    Ranks that share a mask take the same ones. One core stays.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: max(1, round(len(cores) * (1 - share)))])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def tasks_of_node() -> int:
    """Returns this node's number of tasks, from text like "2(x3),1": two on each of three nodes, one on the fourth."""
    node = _number("SLURM_NODEID") or 0
    with suppress(ValueError):
        for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
            tasks, _, nodes = part.rstrip(")").partition("(x")
            node -= int(nodes or 1)
            if node < 0:
                return max(1, int(tasks))
    return 1


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def cpu_quota() -> float | None:
    """Returns the CPU time limit of a container or job, in cores; None if there is no limit.

    `docker run --cpus` and Kubernetes limit time and leave the affinity mask unchanged.
    """
    quotas = (_read_quota(group) for group in control_groups("cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_quota(group: Path) -> float | None:
    # Version 2, then version 1.
    with suppress(OSError, ValueError):
        most, period = (group / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    with suppress(OSError, ValueError):
        most, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(most) / int(period) if int(most) > 0 else None
    return None


def control_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups and of their ancestors, whose limits apply too.

    `controller` is "cpu" or "memory". Some folders may not exist: in a container a path may be the host's, of which
    only the root is visible.
    """
    with suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and controller not in kinds.split(","):
                continue
            # Version 1 has a folder for each controller or set of controllers; version 2 one for all.
            mounts = dict.fromkeys((_CGROUPS / kinds, _CGROUPS / controller)) if kinds else [_CGROUPS]
            parts = Path(path.lstrip("/")).parts
            # A namespace shows paths outside it in this form.
            parts = () if ".." in parts else parts
            for mount in mounts:
                for length in range(len(parts), -1, -1):
                    yield mount.joinpath(*parts[:length])
