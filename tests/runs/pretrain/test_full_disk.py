"""Disks that are full in the middle of a run."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import ROOT, SMALL_PRETRAIN, run, summary_of, wait_until
from helpers.damage import copy_of

from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint

pytestmark = pytest.mark.slow

# One checkpoint of the small MAE is 3 files of 30 to 60 kB.
_LENGTH = ["train.steps=40", "checkpoint.every_steps=5", "monitor.evaluate_every_steps=40"]


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own: disk(kib) makes or resizes it."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        again = ",remount" if os.path.ismount(place) else ""
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options + again, "tmpfs", str(place)],
            capture_output=True,
            text=True,
        )
        if mounted.returncode:
            pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
        return place

    yield mount
    if os.path.ismount(place):
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(path: Path) -> None:
    """Takes all the room there is."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def command(digits, folder, *overrides):
    words = ["pretrain/run.py", "--config", "configs/pretrain/mae_digits.yaml", *SMALL_PRETRAIN, *_LENGTH]
    return [*words, f"data.path={digits}", f"run.dir={folder}", *overrides]


@pytest.fixture(scope="module")
def straight(digits, tmp_path_factory):
    """The run that nothing disturbs, and what its newest checkpoint takes."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert run(*command(digits, folder)).returncode == 0
    newest = list_checkpoints(folder / "checkpoints")[-1]
    size = sum(-(-path.stat().st_size // 4096) * 4 for path in newest.iterdir())
    return (folder / "encoder.safetensors").read_bytes(), size


def test_a_full_disk_stops_the_run_before_work_is_lost_and_room_lets_it_go_on(digits, disk, straight):
    encoder, kib = straight
    place = disk(f"size={int(1.6 * kib)}k")
    ended = run(*command(digits, place / "run"))
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if "warning" in line or "error" in line]
    assert "step 5" in said[0]
    assert "no space left" in said[0]
    assert said[-1].startswith("error: 3 saves")
    # The last good one, that of the beginning, whole, and nothing torn beside it.
    checkpoints = place / "run" / "checkpoints"
    assert [load_checkpoint(path).step for path in list_checkpoints(checkpoints)] == [0]
    assert not list(checkpoints.glob(".*"))
    disk("size=100m")
    assert run(*command(digits, place / "run")).returncode == 0
    assert (place / "run" / "encoder.safetensors").read_bytes() == encoder


def test_on_a_full_disk_older_checkpoints_make_room(digits, disk, straight):
    encoder, kib = straight
    place = disk(f"size={int(2.8 * kib)}k")
    ended = run(*command(digits, place / "run", "checkpoint.keep_last=4"))
    assert ended.returncode == 0, ended.stderr
    assert "cannot be written" not in ended.stderr
    assert (place / "run" / "encoder.safetensors").read_bytes() == encoder


def test_a_disk_that_is_full_for_a_while_stops_nothing(digits, disk):
    place = disk("size=20m")
    folder = place / "run"
    process = subprocess.Popen(
        # Slow enough to be met in the middle.
        [sys.executable, *command(digits, folder, "train.steps=400", "checkpoint.max_failed_saves=99")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: list_checkpoints(folder / "checkpoints"))
        fill(place / "filler")
        error = ""
        # Both are said once it is met.
        while not ("no space left" in error and "metrics of" in error):
            line = process.stderr.readline()
            assert line, error
            error += line
        (place / "filler").unlink()
        error += process.communicate(timeout=500)[1]
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert summary_of(folder)["status"] == "done"


@pytest.mark.parametrize("what", ["decoded images", "index", "features"])
def test_a_file_that_the_disk_cannot_hold_is_one_line_and_leaves_nothing(digits, disk, tmp_path, what):
    """Written through a map of memory, it would kill the process without a word."""
    out, command_line = tmp_path / "run", ["-m", "mae_vit.cli"]
    if what == "decoded images":
        place = disk("size=64k")
        copy_of(digits, tmp_path / "data")
        (tmp_path / "data" / ".index").symlink_to(place)
        ended = run(*command(tmp_path / "data", out))
    elif what == "index":
        assert run(*command_line, "prepare", "digits", str(tmp_path / "one")).returncode == 0
        # Of so many images the index takes nine pages; there is room for four.
        shard = tmp_path / "one" / "train-000000.tar"
        place = disk(f"size={-(-shard.stat().st_size // 4096) * 4 + 16}k")
        ended = run(*command_line, "prepare", str(shard), str(place / "out"))
    else:
        place = disk("size=64k")
        assert run(*command(digits, out)).returncode == 0
        ended = run(*command_line, "embed", str(out), str(digits), "--out", str(place / "f"))
    assert ended.returncode in (1, 2), (ended.returncode, ended.stderr)
    assert "no space left" in ended.stderr.lower()
    assert "Traceback" not in ended.stderr
    assert not [path for path in place.rglob("*") if path.name.endswith(".tmp")]
