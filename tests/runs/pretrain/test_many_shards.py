"""Thousands of shards: a run starts in seconds, and goes on exactly."""

import os
import shutil
from pathlib import Path

import pytest
from helpers.commands import SMALL_MAE, lines_of, run

from mae_vit.data.index import open_index
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.data.prepare.publish import ShardWriter, write_description

SHARDS = 5000


@pytest.fixture(scope="module")
def thousands(digits, tmp_path_factory) -> Path:
    """5,000 shards of two samples: 50 tars, a hundred names for each."""
    out, index = tmp_path_factory.mktemp("thousands"), open_index(digits, "train")
    with ShardWriter(out, "own", shard_bytes=1 << 30, shard_samples=2) as writer:
        for sample in range(100):
            writer.write(f"{sample:06d}", "png", index.read(sample), int(index.labels[sample]))
    shards = []
    for number in range(SHARDS):
        shard = writer.shards[number % 50]
        name = f"train-{number:06d}.tar"
        os.link(out / shard.file, out / name)
        shards.append(shard.model_copy(update={"file": name}))
    train = index.split_info.model_copy(update={"shards": shards, "samples": 2 * SHARDS, "index": None})
    described = index.dataset.model_copy(update={"splits": {"train": train}})
    write_description(out, described)
    index_in_place(out, overwrite=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("order", ["global", "blocks"])
def test_a_run_over_thousands_of_shards_starts_and_goes_on(thousands, tmp_path, order):
    """40 steps of 512 images: two epochs, all shards."""
    words = [
        *("pretrain/run.py", "--config", "configs/pretrain/mae_digits.yaml", f"data.path={thousands}"),
        *("run.name=same", "train.steps=40", "train.warmup_epochs=0", "data.source=tar", *SMALL_MAE),
        *("monitor.log_every_steps=1", "train.effective_batch_size=512", "checkpoint.every_steps=25"),
        *("checkpoint.keep_last=9", f"data.order={order}", "data.workers=1"),
    ]
    encoders, name = [], "checkpoints/step-00000025"
    for kind in ("straight", "resumed"):
        ended = run(*words, f"run.dir={tmp_path / kind}")
        assert ended.returncode == 0, ended.stderr
        encoders.append((tmp_path / kind / "encoder.safetensors").read_bytes())
        if kind == "straight":
            shutil.copytree(tmp_path / kind / name, tmp_path / "resumed" / name)
    assert "step 25 of 40" in ended.stderr + ended.stdout
    assert encoders[0] == encoders[1]
    assert [line["step"] for line in lines_of(tmp_path / "straight") if "loss" in line] == list(range(1, 41))
