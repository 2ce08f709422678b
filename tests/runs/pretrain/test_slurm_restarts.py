"""What a run does when Slurm runs its command again."""

import pytest

from mae_vit.runtime.slurm import mark_slurm_progress


@pytest.fixture
def restart(monkeypatch):
    """Is a job at its n-th restart: restart(n, job)."""

    def call(number: int, job: str = "7") -> None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        if number:
            monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))

    return call


def test_a_run_that_saves_notes_at_which_restart(call, tmp_path, monkeypatch, restart, capsys):
    noted = tmp_path / "noted"
    restart(3)
    monkeypatch.setenv("MAE_VIT_SAVED", str(noted))
    assert call() == 0
    assert noted.read_text() == "3\n"
    # A note that cannot be written is reported and ends nothing.
    monkeypatch.setenv("MAE_VIT_SAVED", str(tmp_path / "gone" / "noted"))
    mark_slurm_progress()
    assert str(tmp_path / "gone" / "noted") in capsys.readouterr().err


@pytest.mark.slow
def test_a_restarted_job_goes_on_with_what_it_has_begun_afresh_itself(call, tmp_path, capsys, restart):
    assert call() == 0
    restart(0)
    assert call("--resume", "never") == 0
    assert (tmp_path / "run.1").exists()
    restart(1)
    assert call("--resume", "never") == 0
    assert "is finished (6 steps)" in capsys.readouterr().out
    assert not (tmp_path / "run.2").exists()
    restart(1, job="8")
    assert call("--resume", "never") == 0
    assert (tmp_path / "run.2").exists()
