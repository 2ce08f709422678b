"""Runs that fail end at once, with their workers, and say why in a line."""

import json
import shutil

import pytest
from helpers.commands import ROOT, run

CONFIG = ["pretrain/run.py", "--config", str(ROOT / "configs" / "mae_digits.yaml")]
# What ends after a step with workers alive, as a full disk would end it.
FAILING = """
import sys
from pathlib import Path

if __name__ == "__main__":
    from mae_vit.data.images.augment import Augment
    from mae_vit.data.index import open_index
    from mae_vit.data.batches.loader import load_batches, start_worker_server
    from mae_vit.data.order.order import GlobalOrder, RankSlice
    from mae_vit.data.batches.sources import open_source

    start_worker_server()
    index = open_index(Path(sys.argv[1]), "train")
    source = open_source(index, "tar", channels=1, augment=Augment((8, 8)), memory_limit_gib=1)
    batches = load_batches(source, GlobalOrder(len(index), 8, 0), RankSlice(), start_step=0, stop_step=99, workers=2)
    next(batches)
    raise OSError("no space left on device")
"""


@pytest.fixture
def damaged(digits, tmp_path):
    """Shards of the right sizes in which no image can be decoded."""
    data = shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".index"))
    for shard in data.glob("train-*.tar"):
        shard.write_bytes(shard.read_bytes().replace(b"\x89PNG", b"GARB"))
    return data


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded_ends_the_run_in_a_line(damaged, tmp_path, workers):
    options = [f"data.path={damaged}", "data.source=tar", f"data.workers={workers}", "train.engine=torch"]
    ended = run(*CONFIG, *options, f"run.dir={tmp_path / 'run'}", timeout=60)
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "cannot read shard train-00000" in errors[0]
    assert f"`mae-vit check {damaged}`" in errors[0]
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_workers_do_not_outlive_an_unforeseen_error(digits, tmp_path):
    """They are deaf to SIGTERM, by which Python would end them and then wait for ever."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    ended = run(str(script), str(digits), timeout=60)
    assert ended.returncode == 1
    assert "no space left on device" in ended.stderr
