"""Fine-tuning over damaged samples: training replaces them, what is measured must be whole."""

import json
import os

import numpy as np
import pytest
from helpers.commands import summary_of
from helpers.damage import WAYS, copy_of, damage, keys_of

from mae_vit.data.batches.subset import draw_held_out
from mae_vit.data.index import open_index

# An epoch of what a tenth held out leaves, but for the rest of 447 images.
EPOCH = [
    *("train.effective_batch_size=450", "train.steps=2", "monitor.evaluate_every_steps=2"),
    *("checkpoint.every_steps=2", "finetune.holdout=0.1", "data.damage_budget=0.02"),
]


@pytest.fixture
def split(digits):
    """Training and held-out samples."""
    labels = np.asarray(open_index(digits, "train").labels)
    held_out, train = draw_held_out(np.arange(len(labels)), labels, keys_of(digits), 0.1)
    return train, held_out


def test_damaged_training_samples_are_replaced_and_not_measured(call, digits, split, tmp_path):
    train, _ = split
    assert 1340 < len(train) < 1355
    copy, bad = copy_of(digits, tmp_path / "data"), train[5:1300:90].tolist()
    keys_of(copy)  # by which held-out samples are drawn: known from a run before
    damage(digits, copy, {sample: list(WAYS)[number % 5] for number, sample in enumerate(bad)})
    assert call(*EPOCH, f"data.path={copy}", "data.source=tar") == 0
    lines = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    # Numbers are those of the split, whatever part of it is trained on; some fall to the rest of an epoch.
    listed = {json.loads(line)["sample"] for line in lines}
    assert listed <= set(bad)
    assert len(bad) > len(listed) >= len(bad) // 2
    assert summary_of(tmp_path / "run")["damaged_samples"] == len(listed)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["train_images_measured"] == len(train) - len(bad)
    assert results["train_size"] == len(train)


def test_damaged_held_out_images_end_the_run(call, digits, split, tmp_path, capsys):
    _, held_out = split
    copy = copy_of(digits, tmp_path / "data")
    damage(digits, copy, {int(held_out[3]): "undecodable"})
    assert call(*EPOCH, f"data.path={copy}") == 1
    assert "train-000000.tar, key" in capsys.readouterr().err
    # The last 20 images of a shard, each with label and headers of 2048 bytes.
    os.truncate(copy / "train-000001.tar", 819_200 - 20 * 2048)
    lost = len(set(range(780, 800)) & set(held_out.tolist()))
    assert lost
    assert call(*EPOCH, f"data.path={copy}", name="other") == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: 20 of 1,497")
    assert error.startswith(f"error: {lost} of the {len(held_out)} ")
    assert f"{copy}/train-000001.tar" in error
    assert "778240 bytes" in error
    assert not (tmp_path / "other").exists()


def test_a_shard_cut_short_tells_labels_and_no_keys(call, digits, tmp_path, capsys):
    copy = copy_of(digits, tmp_path / "data")
    os.truncate(copy / "train-000001.tar", 800_000)
    assert call(*EPOCH, f"data.path={copy}") == 2
    assert 'of split "train"' in capsys.readouterr().err
    assert call("finetune.mode=few_shot", f"data.path={copy}", name="few") == 2
    assert 'split "train" must' in capsys.readouterr().err
    whole_epoch = ["train.effective_batch_size=499", "train.steps=3", "finetune.holdout=0"]
    assert call(*EPOCH, *whole_epoch, f"data.path={copy}", name="all") == 0
    lines = (tmp_path / "all" / "quarantine.jsonl").read_text().splitlines()
    assert {json.loads(line)["sample"] for line in lines} == set(range(790, 800))
