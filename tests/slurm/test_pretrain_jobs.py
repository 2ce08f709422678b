"""Pretraining on two nodes, whatever happens to it: it ends as if nothing had."""

from pathlib import Path

import pytest
from helpers.commands import lines_of, summary_of

from mae_vit.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


@pytest.fixture
def pretrain(cluster, settings, tmp_path):
    """Submits the run on both nodes: pretrain(*sbatch's options, changes=[...], site="")."""

    def call(*options: str, changes=(), site: str = ""):
        folder = tmp_path / "run"
        words = ("--nodes=2", *options, "slurm/pretrain.sh", *settings, *changes, f"run.dir={folder}")
        return cluster.submit(folder, *words, site=site)

    return call


def check_whole(folder: Path, undisturbed: Path) -> None:
    """Each step was written once, and the encoder is the undisturbed run's."""
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 89))
    encoders = [(run / "encoder.safetensors").read_bytes() for run in (folder, undisturbed)]
    assert encoders[0] == encoders[1]


def test_both_nodes_train(undisturbed):
    output = undisturbed.with_suffix(".out").read_text()
    assert "rank 0 is on n1" in output
    assert "rank 1 is on n2" in output
    assert len(lines_of(undisturbed)) == 88


def test_the_limits_signal_saves_and_requeues_as_often_as_it_comes(pretrain, undisturbed, tmp_path):
    # Ranks begin late, as in a container that takes its time: the script keeps a signal for ten seconds, by
    # when a fast machine would be done.
    late = 'container=(bash -c \'sleep 5; exec "$@"\' - "${container[@]}")'
    # Restarts that save are not those that are counted.
    job = pretrain(site=f"max_restarts=1\n{late}")
    # Before there is a rank that could hear it, then in the middle. Slurm calls a job RUNNING before its script
    # runs, and loses a signal sent until then: the script's first note says that it listens.
    notes = tmp_path / "run.notes"
    job.wait_until(lambda: notes.is_dir() and any(notes.iterdir()), "its start")
    job.tell_of_limit()
    job.wait_for("exit code 75 at restart 0: requeueing")
    job.wait_for("\nstep 40/")
    job.tell_of_limit()
    job.wait_for("exit code 75 at restart 1: requeueing")
    assert job.wait() == "COMPLETED", job.output()
    assert job.shown("Restarts") == "2"
    assert job.output().count("resuming from") == 2
    check_whole(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run.notes").iterdir())


@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_power_cut_of_a_node_is_a_requeue_from_the_last_save(
    cluster, pretrain, undisturbed, tmp_path, node
):
    job = pretrain()
    job.wait_for("\nstep 25/")
    cluster.call("crash", node)
    cluster.call("boot", node)
    assert job.wait() == "COMPLETED", job.output()
    assert job.shown("Restarts") == "1"
    assert "resuming from" in job.output()
    check_whole(tmp_path / "run", undisturbed)


def test_a_cancelled_run_is_saved_and_the_same_command_goes_on(pretrain, undisturbed, tmp_path):
    job = pretrain()
    job.wait_for("\nstep 25/")
    job.cancel()
    assert job.wait() == "CANCELLED"
    assert job.shown("Restarts") == "0"
    assert summary_of(tmp_path / "run")["status"] == "interrupted", job.output()
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").step >= 25
    # With nothing of the environment that it is submitted from.
    again = pretrain(f"--export=MAE_VIT_SITE={tmp_path / 'run.site.sh'}")
    assert again.wait() == "COMPLETED", again.output()
    assert "resuming from" in again.output()
    check_whole(tmp_path / "run", undisturbed)


def test_bad_input_is_not_requeued_though_ranks_leave_one_after_the_other(pretrain):
    slow = """container=(bash -c '"$@"; code=$?; sleep $((3 * SLURM_PROCID)); exit $code' -)"""
    job = pretrain(site=f'{slow}\necho "site.sh has $# words"', changes=["train.epochs=many"])
    assert job.wait() == "FAILED"
    assert job.shown("ExitCode") == "2:0"
    assert job.shown("Restarts") == "0"
    assert job.output().startswith("site.sh has 0 words\n")
    assert job.output().count("error: command line: train.epochs='many': ") == 2


def test_a_rank_that_dies_at_each_start_is_given_up(pretrain):
    dies = """container=(bash -c '((SLURM_PROCID == 0)) || kill -KILL $$; exec "$@"' -)"""
    job = pretrain(site=f"{dies}\nsrun_options=(--wait=5)\nmax_restarts=2")
    assert job.wait() == "FAILED"
    assert job.shown("Restarts") == "2"
    assert job.output().count("requeueing") == 2
    assert job.output().endswith(
        "error: gave up, as nothing was saved any more (max_restarts=2); once that is fixed, "
        "the same sbatch resumes it\n"
    )


def test_a_job_that_slurm_itself_restarts_in_vain_is_given_up(cluster, pretrain):
    job = pretrain(
        site="container=(bash -c 'echo hangs at ${SLURM_RESTART_COUNT:-0}; sleep 999')\nmax_restarts=1"
    )
    for restart in (0, 1):
        job.wait_for(f"hangs at {restart}\n")
        cluster.call("run", "scontrol", "requeue", job.number)
    assert job.wait() == "FAILED"
    assert job.shown("Restarts") == "2"
    assert "error: gave up, as nothing was saved any more (max_restarts=1);" in job.output()
