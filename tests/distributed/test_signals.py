"""A stop signal, to any process and under any launcher: saved, resumable, no orphan."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from distributed.launch import Run, logged_steps

from mae_vit.runtime.signals import INTERRUPTED, STOP_SIGNALS
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint

pytestmark = pytest.mark.distributed

# launcher, who gets the signal, which, the launcher's own exit code
SLOW = [
    *[("python", "rank", number, 75) for number in STOP_SIGNALS],
    ("deepspeed", "rank", signal.SIGTERM, None),
    ("deepspeed", "child", signal.SIGTERM, None),
    ("torchrun", "rank", signal.SIGUSR1, None),
    ("torchrun", "runner", signal.SIGTERM, None),
    ("deepspeed", "runner", signal.SIGINT, None),
    ("torchrun", "runner", signal.SIGINT, None),
]
CASES = [
    ("deepspeed", "runner", signal.SIGTERM, None),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
]


def arguments(digits, source: str) -> list[str]:
    return [
        *("--config", "configs/pretrain/mae_digits.yaml", f"data.path={digits}", f"data.source={source}"),
        *(f"data.workers={int(source == 'tar')}", "model.embed_dim=32", "model.depth=1"),
        *("train.epochs=3000", "monitor.log_every_steps=5", "monitor.tensorboard=false"),
        "checkpoint.every_steps=100000",
    ]


@pytest.mark.parametrize(("launcher", "target", "number", "code"), CASES, ids=str)
def test_a_signal_leaves_a_resumable_run_and_no_orphan(digits, tmp_path, launcher, target, number, code):
    # Data workers must neither die of the signal nor outlive the run.
    source = "tar" if target in ("child", "rank") and number == signal.SIGTERM else "memory"
    with Run(tmp_path / "run", launcher, 2, arguments(digits, source)) as run:
        run.wait_for_step(10)
        ranks = run.ranks()
        family = [child for rank in ranks for child in rank.children(recursive=True)]
        assert len(family) >= (2 * len(ranks) if source == "tar" else 0)
        assert len(ranks) == (1 if launcher == "python" else 2)
        if target == "rank":
            ranks[-1].send_signal(number)
        elif target == "child":
            ranks[0].parent().send_signal(number)
        else:
            run.process.send_signal(number)
        exit_code = run.wait()
        run.wait_until_gone()
        assert psutil.wait_procs(family, timeout=500)[1] == []
        assert exit_code == code if code else exit_code != 0
        assert run.status() == "interrupted", run.output()
        saved = list_checkpoints(run.folder / "checkpoints")
        # That of the beginning, and the one of the signal.
        assert len(saved) == 2
        step = load_checkpoint(saved[1]).step
        assert step >= 10
        assert max(logged_steps(run.folder)) <= step

    with Run(
        tmp_path / "run", launcher, 2, [*arguments(digits, "memory"), "monitor.log_every_steps=1"]
    ) as again:
        again.wait_for_step(step + 1)
        assert f"resuming from {saved[1]}, step {step}" in again.output()
    steps = logged_steps(again.folder)
    assert len(steps) == len(set(steps))
    assert steps == sorted(steps)


def hears(pid: int) -> bool:
    """Whether a process catches SIGUSR1."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def test_a_run_stopped_while_it_still_starts_takes_a_step_and_saves(digits, tmp_path):
    with Run(tmp_path / "run", "python", 1, arguments(digits, "memory")) as run:
        while not hears(run.process.pid):
            assert "libtorch" not in Path(f"/proc/{run.process.pid}/maps").read_text(), "it hears too late"
            time.sleep(0.01)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait() == 75, run.output()
    assert run.status() == "interrupted"
    assert 1 <= load_checkpoint(list_checkpoints(run.folder / "checkpoints")[-1]).step <= 2


def test_ctrl_c_while_a_run_still_starts_is_one_line(digits, tmp_path):
    with Run(tmp_path / "run", "python", 1, arguments(digits, "memory")) as run:
        while not hears(run.process.pid):
            time.sleep(0.01)
        time.sleep(1)  # in the midst of its imports
        run.process.send_signal(signal.SIGINT)
        assert run.wait(100) == 130
    assert run.output().strip() == INTERRUPTED
    assert not run.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "deepspeed"])
def test_a_closed_terminal_leaves_a_resumable_run(digits, tmp_path, launcher):
    """The hang-up reaches the whole session, and there is no terminal left to print to."""
    with Run(tmp_path / "run", launcher, 2, arguments(digits, "memory"), terminal=True) as run:
        run.wait_for_step(10)
        run.hang_up()
        run.wait()
        run.wait_until_gone()
        assert run.status() == "interrupted", run.output()
        saved = list_checkpoints(run.folder / "checkpoints")
        assert len(saved) == 2
        assert load_checkpoint(saved[1]).step >= 10
