"""Starts runs the way people do, kills them, and reads what they leave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil
from helpers.commands import ROOT

from mae_vit.runtime.ranks import free_port


def command(
    launcher: str,
    ranks: int,
    arguments: list[str],
    script: str = "pretrain/run.py",
    *,
    nodes: tuple[str, ...] = (),
) -> list[str]:
    """The command line of `python`, `deepspeed` or `torchrun`; `nodes` are torchrun's options for several."""
    port, deepspeed = str(free_port()), str(Path(sys.executable).with_name("deepspeed"))
    words = {
        "python": [],
        "deepspeed": [deepspeed, "--num_accelerators", str(ranks), "--master_port", port],
        "torchrun": [
            *("-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
            *(nodes or (f"--master-port={port}",)),
        ],
    }[launcher]
    return [sys.executable, *words, script, *arguments]


def finished(
    folder: Path, launcher: str, ranks: int, arguments: list[str], script: str = "pretrain/run.py"
) -> Run:
    """A run that has ended well."""
    run = Run(folder, launcher, ranks, arguments, script=script)
    assert run.wait() == 0, run.output()
    return run


def hear_signals() -> None:
    """In a new process: what is ignored around the tests (nohup, a background job) is not ignored by it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _sit_down() -> None:
    """In a new process: its standard input is its terminal."""
    hear_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Run:
    """A run in its own session; every process of it is found again by its marker."""

    def __init__(
        self,
        folder: Path,
        launcher: str,
        ranks: int,
        arguments: list[str],
        *,
        terminal: bool = False,
        script: str = "pretrain/run.py",
        nodes: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.marker = f"run.dir={folder}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.log = (folder.parent / f"{folder.name}.log").open("a")
        shown = self._open_terminal() if terminal else self.log
        self.process = subprocess.Popen(
            command(launcher, ranks, [*arguments, self.marker], script, nodes=nodes),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
            stdin=shown if terminal else subprocess.DEVNULL,
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_sit_down if terminal else hear_signals,
        )
        if terminal:
            os.close(shown)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def _open_terminal(self) -> int:
        """Opens a terminal that is copied to the log; returns the end that a program sits at."""
        self._terminal, inside = pty.openpty()

        self._hung_up = threading.Event()

        def copy() -> None:
            with contextlib.suppress(OSError):
                while not self._hung_up.is_set():
                    # A read under way would keep the terminal open.
                    if select.select([self._terminal], [], [], 0.1)[0]:
                        self.log.write(os.read(self._terminal, 4096).decode(errors="replace"))
            os.close(self._terminal)

        self._copying = threading.Thread(target=copy, daemon=True)
        self._copying.start()
        return inside

    def hang_up(self) -> None:
        """Closes the terminal, as a lost connection does."""
        self._hung_up.set()
        self._copying.join()

    def processes(self) -> list[psutil.Process]:
        """Every living process that has this run's folder in its command line."""
        processes = []
        for process in psutil.process_iter():
            try:
                if self.marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except psutil.Error:
                continue
        return processes

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, lowest rank first."""
        ranks = []
        for process in self.processes():
            try:
                environment = process.environ()
                words = process.cmdline()
            except psutil.Error:
                continue
            # `python -u pretrain/run.py`: launchers have other words in front of the script.
            if any(word.endswith(("pretrain/run.py", "finetune/run.py")) for word in words[1:3]):
                ranks.append((int(environment.get("RANK", 0)), process))
        return [process for _, process in sorted(ranks, key=lambda pair: pair[0])]

    def step(self) -> int:
        """The last step logged in metrics.jsonl."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):
            return 0

    def wait_for_step(self, step: int, timeout: float = 500) -> None:
        deadline = time.monotonic() + timeout
        while self.step() < step:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def wait(self, timeout: float = 500) -> int:
        return self.process.wait(timeout)

    def wait_until_gone(self, timeout: float = 300) -> None:
        """No process of the run is left, orphans included."""
        deadline = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there: {left}\n{self.output()}"
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to everything at once: a power cut."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        self.process.wait(500)
        self.wait_until_gone()

    def kill_node(self) -> None:
        """SIGKILL to this launcher and its ranks: other nodes of the run stay."""
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(True)]:
            process.kill()
        self.process.wait(500)

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()[-4000:]

    def status(self) -> str:
        return json.loads((self.folder / "summary.json").read_text())["status"]


def logged_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
