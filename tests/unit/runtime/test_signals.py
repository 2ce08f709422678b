"""Stop requests of a terminal: heard at once, also within one long operation."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from mae_vit.runtime.signals import find_launchers

# A single call that no signal interrupts, for minutes: Python's own handlers would run after it.
_LONG_STEP = """
import hashlib
from mae_vit.runtime.signals import StopRequest
stop = StopRequest()
print("in a step", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize(
    ("arguments", "launches"),
    [
        (["deepspeed-trials/sweep.py"], False),
        (["-m", "torch.distributed.run"], True),
        (["bin/torchrun"], True),
    ],
)
def test_launchers_are_known_by_name(monkeypatch, arguments, launches):
    parent = SimpleNamespace(name=lambda: "python3", cmdline=lambda: ["/bin/python3", *arguments])
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [parent])
    assert find_launchers() == [parent] * launches


def test_a_second_ctrl_c_ends_the_process_within_a_long_operation():
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
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Ctrl-C again" in errors
    assert errors.splitlines()[-1].startswith("interrupted without saving")
