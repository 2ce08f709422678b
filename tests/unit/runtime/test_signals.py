"""Stop requests of a terminal: heard at once, also within one long operation."""

import signal
import subprocess
import sys
import time

import pytest
from helpers.commands import run

# A single call that no signal interrupts, for minutes: Python's own handlers would run after it.
_LONG_STEP = """
import hashlib
from mae_vit.runtime.signals import StopRequest
stop = StopRequest("another command")
print("in a step", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


_RANK = "from mae_vit.runtime.signals import find_launchers; print(len(find_launchers()), 'launchers')"
_SWEEP = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]], check=True)"


@pytest.mark.parametrize(
    ("launcher", "count"),
    [(["-m", "torch.distributed.run", "--nproc-per-node=1"], 1), (["deepspeed-trials/sweep.py"], 0)],
)
def test_launchers_are_known_by_what_was_started(tmp_path, launcher, count):
    """torchrun's process has another name, and other programs may have a launcher's name in their path."""
    (tmp_path / "deepspeed-trials").mkdir()
    (tmp_path / "deepspeed-trials" / "sweep.py").write_text(_SWEEP)
    (tmp_path / "torchrun.py").write_text(_RANK)
    told = run("-u", *launcher, "torchrun.py", cwd=tmp_path)
    assert f"{count} launchers" in told.stdout, told.stderr


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]])
def test_a_second_ctrl_c_ends_the_process_within_a_long_operation(before):
    process = subprocess.Popen(
        [sys.executable, "-c", _LONG_STEP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Around the tests it may be ignored: they may be a background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "in a step\n"
        for number in [*before, signal.SIGINT, signal.SIGINT]:
            process.send_signal(number)
            time.sleep(0.2)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Ctrl-C again" in errors
    assert errors.splitlines()[-1].startswith("interrupted without saving; another command resumes")
