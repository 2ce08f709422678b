"""One process writes a run folder."""

import errno
import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.commands import summary_of

from mae_vit.core.errors import InputError
from mae_vit.training import startup
from mae_vit.training.outputs import run_folder
from mae_vit.training.outputs.run_folder import lock_run

_HOLD = """
import sys, time
from pathlib import Path
from mae_vit.training.outputs.run_folder import lock_run
lock = lock_run(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that keeps the run folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run_folder, "_WAIT_S", 1.0)


# An old run that goes on is not moved aside.
@pytest.mark.parametrize("words", [[], ["--resume", "never"]])
def test_a_second_process_is_refused_and_harms_nothing(call, holder, tmp_path, capsys, words):
    assert call(*words) == 2
    waiting, error = capsys.readouterr().err.strip().splitlines()
    assert "1 s" in waiting
    assert f"process {holder.pid} on " in error
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"]
    assert not (tmp_path / "run.1").exists()


def test_a_disk_without_room_for_the_holders_name_is_an_input_error(tmp_path, monkeypatch):
    def write_text(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(InputError, match="no space left"):
            lock_run(tmp_path / "run")
    # Nobody keeps it.
    lock_run(tmp_path / "run").close()


def test_without_the_systems_locks_a_killed_process_keeps_nothing(holder, tmp_path, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock_run(tmp_path / "run"), lock_run(tmp_path / "run"):
        pass


def test_one_that_leaves_is_waited_for(call, holder, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_WAIT_S", 60.0)
    # Outright: nothing of it can clear anything away.
    threading.Timer(1.0, holder.kill).start()
    begun = time.monotonic()
    assert call() == 0
    assert time.monotonic() - begun > 1.0
    assert summary_of(tmp_path / "run")["status"] == "done"


def test_one_that_waited_does_not_begin_a_run_anew(call, tmp_path, monkeypatch, capsys):
    assert call() == 0
    # As a process that looked before the other one created the folder.
    monkeypatch.setattr(startup, "_find_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(startup, "check_resumable", lambda *_, **__: None)
    assert call() == 2
    assert "another process has begun this run" in capsys.readouterr().err
    assert summary_of(tmp_path / "run")["status"] == "done"


def test_a_machine_that_crashed_is_waited_for_longer(holder, tmp_path, monkeypatch):
    path = tmp_path / "run" / ".lock"
    path.write_text(path.read_text().replace('"host": "', '"host": "another-'))
    monkeypatch.setattr(run_folder, "_WAIT_S", 0.0)
    threading.Timer(1.0, holder.kill).start()
    lock_run(tmp_path / "run").close()
