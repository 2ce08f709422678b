"""`mae-vit prepare` on several processes, killed, and trained on."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
from helpers.commands import ROOT, SMALL_PRETRAIN, wait_until
from helpers.images import encoded, picture, write_files
from unit.data.band_files import npy, values

from mae_vit.cli.main import main
from mae_vit.data.prepare.convert import Conversion, convert_entries
from mae_vit.data.prepare.entries import Entry
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.pretraining.command import main as pretrain


@pytest.fixture
def many(tmp_path):
    files = {f"c{n % 3}/{n}.jpg": encoded(picture(n, (50 + n % 7, 40))) for n in range(700)}
    return write_files(tmp_path / "src", files | {"c0/broken.jpg": b"\xff\xd8\xff\xe0 no"})


def test_processes_write_the_same_bytes(many, tmp_path, digits):
    options = ["--resize", "32", "--exclude", str(digits)]
    for workers in ("0", "2"):
        assert main(["prepare", str(many), str(tmp_path / workers), "--workers", workers, *options]) == 0
    names = sorted(path.name for path in (tmp_path / "0").iterdir() if path.name != "prepare.log")
    assert names == ["dataset.json", "train-000000.tar", "train-index.npy"]
    for name in names:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_processes_measure_bands_the_same(tmp_path):
    files = {f"{n}.npy": npy(values(2, "float32", n, n + 5) + np.float32(n / 7)) for n in range(530)}
    source = write_files(tmp_path / "src", files)
    for workers in ("0", "2"):
        assert main(["prepare", str(source), str(tmp_path / workers), "--workers", workers]) == 0
    one, two = (read_dataset(tmp_path / name) for name in ("0", "2"))
    # Images are grouped differently, which moves the last digits of floats.
    np.testing.assert_allclose(one.mean, two.mean, rtol=1e-7)
    np.testing.assert_allclose(one.std, two.std, rtol=1e-7)
    assert one.band_table.percentiles == two.band_table.percentiles
    assert not one.band_table.exact


def test_results_come_in_order_and_are_read_ahead_in_bounds():
    read = []

    def image(number: int) -> bytes:
        read.append(number)
        return encoded(picture(number % 5, (8, 8)), "bmp")

    entries = [Entry("train", None, f"{n}", f"{n}.bmp", "bmp", partial(image, n)) for n in range(3000)]
    results = convert_entries(entries, Conversion(), 1, "", [], count=3000)
    assert next(results)[0] is entries[0]
    assert len(read) < 1500
    assert [entry.key for entry, _, _ in results] == [f"{n}" for n in range(1, 3000)]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mae_vit.cli.main", "prepare", *map(str, arguments)]


def group(leader: int) -> list[psutil.Process]:
    """The living processes of a group."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return members


def test_processes_go_when_their_parent_is_killed(many, tmp_path):
    process = subprocess.Popen(
        command(many, tmp_path / "out", "--workers", 2, "--shard-samples", 1),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    # The command, the tracker of its semaphores, two workers.
    wait_until(lambda: len(group(process.pid)) >= 4 or process.poll() is not None)
    assert len(group(process.pid)) == 4
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not group(process.pid))


def test_a_kill_leaves_what_dataset_json_says(tmp_path):
    """SIGKILL at several moments of adding a split: the folder stays whole."""
    out = tmp_path / "out"
    assert main(["prepare", "digits", str(out)]) == 0
    before = (out / "dataset.json").read_bytes()
    files = {f"src/val/{n % 10}/{n}.jpg": encoded(picture(n, (200, 200))) for n in range(400)}
    write_files(tmp_path, files)
    for killed in range(3):
        process = subprocess.Popen(
            command(tmp_path / "src", out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        wait_until((out / ".val.partial").exists, 0.005)
        time.sleep(0.05 * killed)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (out / "dataset.json").read_bytes() != before:
            break
        assert main(["check", str(out)]) == 0
    assert subprocess.run(command(tmp_path / "src", out), capture_output=True).returncode == 0
    assert main(["check", str(out)]) == 0
    assert set(json.loads((out / "dataset.json").read_text())["splits"]) == {"train", "test", "val"}
    assert [name for name in os.listdir(out) if "partial" in name] == []


def test_a_folder_of_images_is_enough_to_train(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {f"{'ab'[n % 2]}/{n:03d}.jpg": encoded(picture(n)) for n in range(24)}
    options = [*SMALL_PRETRAIN, "train.steps=2", "train.effective_batch_size=4", "monitor.evaluate_images=4"]
    options += ["data.augment.crop=random_resized", "model.in_chans=3", f"run.dir={tmp_path / 'run'}"]
    options.append(f"data.path={write_files(tmp_path / 'out', files)}")
    assert pretrain(["--config", str(ROOT / "configs" / "pretrain" / "mae_digits.yaml"), *options]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
