"""What a rank finds out about its task: the cores that are its own, and the GPU."""

import ast

import pytest
from helpers.commands import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

# In place of the program: two ranks in the task.
TORCHRUN = """container=(bash -c 'shift 2; exec torchrun --standalone --nproc-per-node=2 "$@"' -)"""


@pytest.mark.parametrize(
    ("options", "site", "cores"),
    [
        # Each task is bound to two cores of its own, as Slurm sees it: this machine may have no more.
        (
            ["--ntasks-per-node=2", "--cpus-per-task=2"],
            "container=()\nsrun_options=(--cpu-bind=mask_cpu:0x3,0x3)",
            "2, 1 worker for each of 2 ranks",
        ),
        # All see all cores.
        (
            ["--ntasks-per-node=2", "--cpus-per-task=1"],
            "container=()\nsrun_options=(--cpu-bind=none)",
            "1, 0 workers for each of 2 ranks",
        ),
        (["--ntasks-per-node=1", "--cpus-per-task=2"], TORCHRUN, "1, 0 workers for each of 2 ranks"),
    ],
    ids=["bound", "not bound", "torchrun in a task"],
)
def test_the_plan_tells_the_cores_of_a_rank(cluster, settings, tmp_path, options, site, cores):
    folder = tmp_path / "run"
    words = [*settings, "data.workers=auto", f"run.dir={folder}", "--dry-run"]
    job = cluster.submit(folder, "--nodes=1", *options, "slurm/pretrain.sh", *words, site=site)
    assert job.wait() == "COMPLETED", job.output()
    assert f"\ncores       {cores}\n" in job.output()


def test_ranks_that_see_their_own_gpu_alone_take_number_0(cluster, tmp_path):
    site = f"container=(env PYTHONPATH={ROOT} python {ROOT / 'tests/slurm/one_gpu_each.py'})"
    words = ["--nodes=1", "--ntasks-per-node=4", "slurm/pretrain.sh", "configs/pretrain/mae_digits.yaml"]
    job = cluster.submit(tmp_path / "run", *words, site=site)
    assert job.wait() == "COMPLETED", job.output()
    lines = [line for line in job.output().splitlines() if line.startswith("facts ")]
    facts = sorted((ast.literal_eval(line.removeprefix("facts ")) for line in lines), key=lambda f: f["rank"])
    assert [rank["local"] for rank in facts] == ["0", "1", "2", "3"], job.output()
    for rank in facts:
        assert rank["device"] == "cuda:0"
        assert rank["taken"] == [0]
        assert rank["bound"] == [("nccl", "cuda:0")]
        assert rank["deepspeed"] == "0"
        assert rank["met"] == 4
        # One speaks for its node still.
        assert rank["first"] == (rank["rank"] == 0)
