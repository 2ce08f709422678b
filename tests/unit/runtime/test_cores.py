"""The cores of a rank, in every kind of job that ranks are started in."""

import os
import subprocess
import sys

import pytest

from mae_vit.runtime import cores as machine
from mae_vit.runtime.cores import cores_of_rank, cpu_quota, without_cores
from mae_vit.runtime.ranks import Ranks, find_ranks

STEP = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}


def step(tasks: int, **more: str) -> dict[str, str]:
    """What srun tells each task of eight on a node."""
    return (
        STEP | {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": f"8(x{tasks // 8})"} | more
    )


def one_task(nodes: int, **more: str) -> dict[str, str]:
    """What srun tells the one task of each node."""
    return STEP | {"SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})"} | more


# name: (cores in the mask, environment, (ranks, ranks of this node), cores of a rank)
CASES = {
    "python": (16, {}, (1, 1), 16),
    "torchrun or deepspeed": (96, {}, (8, 8), 12),
    "more ranks than cores": (2, {}, (8, 8), 1),
    "torchrun in a batch script, task/none": (192, {"SLURM_CPUS_ON_NODE": "96"}, (8, 8), 12),
    "srun, bound": (12, step(8, SLURM_CPUS_PER_TASK="12", SLURM_CPUS_ON_NODE="96"), (8, 8), 12),
    "srun, task/none": (192, step(8, SLURM_CPUS_PER_TASK="12", SLURM_CPUS_ON_NODE="96"), (8, 8), 12),
    "srun without --cpus-per-task, bound": (1, step(8, SLURM_CPUS_ON_NODE="8"), (8, 8), 1),
    "srun --exclusive, not bound": (96, step(8, SLURM_CPUS_ON_NODE="96"), (8, 8), 12),
    "srun that says nothing of cores": (96, step(8), (8, 8), 12),
    "srun, the node of fewer tasks": (
        *(
            96,
            STEP
            | {"SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "20", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4"},
            (20, 8),
            24,
        ),
    ),
    # RANK=$SLURM_PROCID python ...: without LOCAL_WORLD_SIZE, and with it.
    "srun, ranks by hand": (12, step(16, SLURM_CPUS_PER_TASK="12"), (16, 1), 12),
    "srun, ranks by hand, LOCAL_WORLD_SIZE given": (12, step(16, SLURM_CPUS_PER_TASK="12"), (16, 8), 12),
    "torchrun in one task of each node, task/none": (
        *(192, one_task(2, SLURM_CPUS_PER_TASK="96", SLURM_CPUS_ON_NODE="96"), (16, 8), 12),
    ),
    "torchrun in one task of a node, no --cpus-per-task": (
        *(96, one_task(1, SLURM_CPUS_ON_NODE="96"), (8, 8), 12),
    ),
    "a comparison's run in its share of a task": (4, one_task(1, SLURM_CPUS_PER_TASK="32"), (1, 1), 4),
}


@pytest.fixture
def place(monkeypatch):
    """Puts this process in a machine: place(cores, environment, quota=None)."""

    def put(cores: int, environment: dict[str, str], quota: float | None = None) -> None:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr(machine, "cpu_quota", lambda: quota)

    return put


@pytest.mark.parametrize("case", CASES)
def test_the_cores_of_a_rank(place, case):
    mask, environment, (world_size, local_world_size), expected = CASES[case]
    place(mask, environment)
    assert cores_of_rank(world_size=world_size, local_world_size=local_world_size) == expected


@pytest.mark.parametrize(
    ("quota", "ranks", "expected"),
    [(8.0, 1, 8), (2.5, 1, 2), (0.5, 1, 1), (16.0, 8, 2), (900.0, 8, 12), (None, 8, 12)],
)
def test_a_quota_is_shared_by_the_ranks_of_a_node(place, quota, ranks, expected):
    place(96, {}, quota)
    assert cores_of_rank(world_size=ranks, local_world_size=ranks) == expected


VERSION_2 = "0::/pod/box"
VERSION_1 = "4:cpu,cpuacct:/pod/box"


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        (VERSION_2, {"pod/box/cpu.max": "250000 100000"}, 2.5),
        (VERSION_2, {"pod/box/cpu.max": "max 100000"}, None),
        # The tightest of nested limits holds.
        (VERSION_2, {"pod/box/cpu.max": "300000 100000", "pod/cpu.max": "200000 100000"}, 2.0),
        # In a container that is shown the host's path, or one outside of its own.
        (VERSION_2, {"cpu.max": "150000 50000"}, 3.0),
        ("0::/../../pod", {"cpu.max": "150000 50000", "../../pod/cpu.max": "1 100000"}, 3.0),
        (VERSION_2, {"cpu.max": "a riddle"}, None),
        (VERSION_2, {}, None),
        (VERSION_1, {"cpu,cpuacct/pod/box/cpu.cfs_quota_us": "200000"}, 2.0),
        (VERSION_1, {"cpu/pod/box/cpu.cfs_quota_us": "-1"}, None),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "600000"}, 6.0),
        # Another controller's group.
        ("7:memory:/pod/box", {"cpu/pod/box/cpu.cfs_quota_us": "200000"}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, monkeypatch, line, files, expected):
    process_cgroups = tmp_path / "own"
    process_cgroups.write_text(f"1:name=systemd:/elsewhere\n{line}\n")
    root = tmp_path / "at" / "root"
    root.mkdir(parents=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if "cfs_quota" in name:
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(machine, "_CGROUPS", root)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", process_cgroups)
    assert cpu_quota() == expected


def test_without_control_groups_there_is_no_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "nothing")
    assert cpu_quota() is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_processes_stay_off_the_cores_that_are_taken_away():
    mine = sorted(os.sched_getaffinity(0))
    ask = [sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"]
    for share, count in ((0.5, max(1, round(len(mine) / 2))), (1.0, 1), (0.0, len(mine))):
        with without_cores(share):
            seen = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
        assert [int(core) for core in seen.split()] == mine[:count]
        assert sorted(os.sched_getaffinity(0)) == mine


def test_a_task_of_srun_knows_how_many_are_on_its_own_node(monkeypatch):
    step_of_seven = STEP | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    for node, rank, local_rank, on_node in ((2, 5, 1, 2), (3, 6, 0, 1)):
        own = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank)}
        main_rank = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        monkeypatch.setattr(os, "environ", {**step_of_seven, **own, **main_rank})
        assert find_ranks() == Ranks(rank, 7, local_rank, on_node)
