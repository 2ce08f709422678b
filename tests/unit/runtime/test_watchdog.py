"""A process that stands still is killed; one that goes on, or has a long thing to do, is not."""

import re
import signal
import subprocess
import sys
import time

from helpers.commands import run

_SCRIPT = """
import sys, time
from mae_vit.runtime.watchdog import Watchdog
# A busy machine may wake a process more than a second late.
dog = Watchdog(2.0, rank=3)
time.sleep(2.5)
dog.__enter__()
for _ in range(8):
    dog.heartbeat("in a step")
    time.sleep(0.3)
with dog.long_phase("saving"):
    time.sleep(2.5)
if sys.argv[1] == "close":
    dog.__exit__()
print("alive", flush=True)
time.sleep(4 if sys.argv[1] == "close" else 100)
"""


def test_standing_still_is_ended_and_reported():
    ended = run("-c", _SCRIPT, "go")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "alive\n"
    # A busy machine looks late.
    assert re.match(r"error: rank 3 .* ([2-9]|\d\d) s \(saving\)", ended.stderr), ended.stderr
    # The sleep at its end.
    assert f'File "<string>", line {len(_SCRIPT.splitlines())} in <module>' in ended.stderr


def test_a_process_that_was_suspended_goes_on():
    script = "from mae_vit.runtime.watchdog import Watchdog\nwith Watchdog(2.0, rank=0): print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    process.communicate(b"\n")
    assert process.returncode == 0


def test_a_closed_watch_ends_nothing():
    assert run("-c", _SCRIPT, "close").returncode == 0
