"""Whole runs in this process, on the torch engine: what they leave, failure, options."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, SMALL_PRETRAIN, lines_of, summary_of
from helpers.damage import copy_of, description
from PIL import Image

from mae_vit.config.load import load_config
from mae_vit.data.batches.loader import FixedBatches
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import open_data
from mae_vit.pretraining.plan_text import describe_plan
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint
from mae_vit.training.engines.precision import AUTO_PRECISION, Chosen
from mae_vit.training.engines.state import LossScale
from mae_vit.training.startup import open_run_folder

CONFIG = ROOT / "configs" / "pretrain" / "mae_digits.yaml"
# The encoder of the unchanged config, made once, then those of each change.
SEEN: list[bytes] = []


def test_a_run_leaves_what_it_promises(call, tmp_path, capsys):
    assert call("monitor.tensorboard=true", "monitor.evaluate_images=7") == 0
    folder = tmp_path / "run"
    files = ".lock config.yaml environment.json metrics.jsonl plan.txt encoder.safetensors summary.json"
    folders = "tensorboard checkpoints pictures"
    assert {path.name for path in folder.iterdir()} == {*files.split(), *folders.split()}
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    finite = ("epoch", "samples", "loss", "lr", "grad_norm", "images_per_s", "data_wait_frac")
    for line in lines:
        assert all(math.isfinite(line[name]) for name in (*finite, "peak_memory_gib"))
        assert 0 <= line["data_wait_frac"] <= 1
    assert [line["step"] for line in lines if "heldout" in line] == [3, 6]
    pictures = sorted((folder / "pictures").iterdir())
    assert [path.name for path in pictures] == ["step-00000003.png", "step-00000006.png"]
    assert Image.open(pictures[1]).width == 7 * (8 * 8 + 2)
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"], summary["samples"]) == ("done", 6, 6 * 128)
    assert summary["heldout"] == lines[-1]["heldout"]
    output = capsys.readouterr().out
    assert str(folder / "encoder.safetensors") in output
    assert output.count("note: 6 steps may be too few") == 1


def test_an_infinite_loss_fails_before_it_is_saved(call, tmp_path, capsys, monkeypatch):
    # No lower loss scale helps.
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0, 0, 0, 2000))
    folder = tmp_path / "run"
    assert call("optim.lr=1e30", "train.precision=fp16") == 1
    assert "is not finite" in capsys.readouterr().err
    assert summary_of(folder)["status"] == "failed"
    assert not (folder / "encoder.safetensors").exists()
    states = [load_checkpoint(path).state for path in list_checkpoints(folder / "checkpoints")]
    assert all(state.is_finite() for state in states)


def test_a_run_keeps_the_precision_that_auto_was_when_it_began(call, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(AUTO_PRECISION, "bf16")
    assert call("train.precision=auto", "train.steps=2") == 0
    monkeypatch.setenv(AUTO_PRECISION, "fp32")
    longer = ["train.precision=auto", "train.steps=3", "--extend"]
    assert call(*longer, "--dry-run") == 0
    assert call(*longer) == 0
    output = capsys.readouterr().out
    assert output.count("precision: bf16 (auto: ") == 2
    assert "precision   bf16 (auto: " in output
    assert "\n  precision: bf16\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert call("train.precision=fp32", "train.steps=4", "--extend") == 2
    assert "train.precision was 'bf16'" in capsys.readouterr().err


def test_dry_run_sets_shards_against_ranks_and_lanes(many_shards, digits, tmp_path):
    def order_lines(*arguments: str, ranks: int = 1) -> list[str]:
        options = [*SMALL_PRETRAIN, f"run.dir={tmp_path}", "train.engine=deepspeed", *arguments]
        config = load_config(PretrainConfig, CONFIG, options)
        setup = set_up(config, Ranks(rank=0, world_size=ranks, local_rank=0))
        precision = Chosen("fp32", "test")
        plan = describe_plan(setup, open_run_folder(config), None, precision, timed=False).splitlines()
        return [line for line in plan if line.startswith(("order ", "warning: "))]

    path = f"data.path={many_shards}"
    (line,) = order_lines(path)
    assert "all 64 shards" in line
    (line,) = order_lines(path, "data.order=blocks", ranks=2)
    assert all(part in line for part in ("64 shards", "16 blocks", "8 lanes", "reads 4 lanes"))
    assert 32 <= int(line.split("at most ")[1].split(" ")[0]) <= 32 + 2 * 4
    (line,) = order_lines(path, "data.order=blocks", "data.lanes=4", ranks=8)
    assert "reads 1/2 lanes" in line
    _, warning = order_lines(f"data.path={digits}", "data.order=blocks")
    assert all(f"data.{key}" in warning for key in ("lanes=8", "block_shards=4", "block_shards=1", "lanes=4"))
    _, warning = order_lines(path, "data.order=blocks", "data.block_shards=10")
    assert "at least 80" in warning
    assert "data.block_shards=8" in warning


def test_the_plan_reads_well_and_nothing_is_written(call, tmp_path, capsys):
    """One of a thing is named in the singular."""

    def plan(*options: str) -> str:
        assert call("--dry-run", *options) == 0
        return capsys.readouterr().out

    output = plan()
    named = ("parameters", "16 tokens", "GFLOP", "6 steps", "1,497 images", "lr  ", "time ", "threads ")
    for word in (*named, "compiled    no: train.compile=auto", "memory", "disk"):
        assert word in output, word
    assert "enlarged to 16 x 16 px" in plan("model.img_size=16", "data.augment.crop=none")
    one = ("train.steps=1", "train.warmup_steps=0", "monitor.evaluate_every_steps=1")
    output = plan(*one, "checkpoint.every_steps=1", "data.split=test", "data.source=memory")
    assert not re.findall(r"\b1 (?:steps|ranks|shards|workers|micro-batches|images|checkpoints)\b", output)
    assert "300 images in 1 shard, " in output
    assert re.search(r"checkpoints? of [0-9.]+ MiB,", output)
    assert output.count("at the end") == 1  # the split that is held out otherwise is trained on
    assert "1 rank x 1 micro-batch x 128" in output
    output = plan("checkpoint.every_steps=1", "monitor.evaluate_every_steps=1")
    assert "enlarged" not in output
    assert "4 shards" in output
    assert output.count("every step") == 2
    assert "none: monitor.probe_queries=0" in plan("monitor.probe_queries=0")
    assert not (tmp_path / "run").exists()


def test_the_probe_is_fitted_to_held_out_images_where_no_training_labels_are_at_hand(digits, monkeypatch):
    config = load_config(PretrainConfig, CONFIG, [f"data.path={digits}"])
    monkeypatch.setattr("mae_vit.pretraining.data._FEW_TO_DRAW_FROM", 1)
    data = open_data(config, Ranks(), torch.device("cpu"))
    support, queries = data.probe_split.support, data.probe_split.queries
    assert (len(support), len(queries), data.probe_split.of_training) == (149, 151, False)
    assert not set(support) & set(queries)
    probe = data.probe(Ranks(), batch_size=64)
    held_out = np.asarray(data.held_out_source.labels)
    assert probe.labels.tolist() == held_out[np.concatenate([support, queries])].tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_probe_is_fitted_to_training_images_and_scored_on_held_out_ones(digits, world_size):
    config = load_config(PretrainConfig, CONFIG, [f"data.path={digits}"])
    ranks = [Ranks(rank, world_size, rank, world_size) for rank in range(world_size)]
    data = open_data(config, ranks[0], torch.device("cpu"))
    probes = [data.probe(rank, batch_size=64) for rank in ranks]
    assert len(probes[0].labels) == 550
    images = torch.zeros(550, 1, 8, 8, dtype=torch.uint8)
    for probe in probes:
        images[probe.places] = torch.cat([batch.images for batch in probe.batches])
        labels = torch.cat([batch.labels for batch in probe.batches])
        assert labels.equal(probe.labels[probe.places].to(labels.dtype))
    split = data.probe_split
    plain = replace(data.source, augment=data.held_out_source.augment)
    for source, numbers, part in (
        (plain, split.support, images[:250]),
        (data.held_out_source, split.queries, images[250:]),
    ):
        (batch,) = FixedBatches(source, numbers, seed=0, batch_size=999)
        assert batch.images.equal(part)


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=5",
        "optim.lr=2e-3",
        "optim.weight_decay=0.9",
        "optim.clip_grad=0.01",
        "train.warmup_steps=2",
        "train.effective_batch_size=64",
        "train.precision=bf16",
        "optim.betas=null optim.name=adam",
        "optim.betas=null optim.name=sgd optim.momentum=0.5",
        "optim.betas=null optim.name=lars",
        "optim.name=muon",
        "data.normalize=half",
        "data.augment.flip=true",
        "data.augment.crop=random_resized",
        "data.split=test",
        "model.pos_embed=sincos",
        "model.drop_rate=0.2",
        "objective.mask_ratio=0.5",
    ],
)
def test_every_training_option_changes_the_encoder(call, encoder, change):
    base = ["train.steps=4", "monitor.evaluate_every_steps=4"]
    if not SEEN:
        assert call(*base, name="base") == 0
        SEEN.append(encoder("base"))
    # An option of an option is to change what it belongs to.
    assert call(*base, *re.split(r" (?=[a-z]+\.)", change), name="changed") == 0
    assert encoder("changed") not in SEEN
    SEEN.append(encoder("changed"))


def test_data_without_a_held_out_split_says_so(call, digits, tmp_path, capsys):
    data = copy_of(digits, tmp_path / "data")
    with description(data) as described:
        del described["splits"]["test"]
    retention = ["checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_every=2"]
    assert call(f"data.path={data}", *retention) == 0
    assert "--holdout" in capsys.readouterr().err
    assert not (tmp_path / "run" / "pictures").exists()
    # The last is kept, and every second.
    folder = tmp_path / "run" / "checkpoints"
    assert [load_checkpoint(path).step for path in list_checkpoints(folder)] == [2, 4, 6]


def test_the_online_probe_scores_and_changes_nothing(call, tmp_path, encoder, monkeypatch):
    monkeypatch.setattr("mae_vit.config.plan._TRAINED_PER_PROBED", 1)
    assert call(name="with") == 0
    assert call("monitor.probe_queries=0", name="without") == 0
    lines = lines_of(tmp_path / "with")
    assert [line["step"] for line in lines if "probe" in line] == [5, 6]
    for line in lines[4:]:
        assert set(line["probe"]) == {"few_shot_top1", "knn_top1", "chance_top1", "seconds"}
        # Even random features tell digits apart far above the 10 % of chance.
        assert 0.2 < line["probe"]["few_shot_top1"] <= 1
    assert not any("probe" in line for line in lines_of(tmp_path / "without"))
    summary = summary_of(tmp_path / "with")
    assert summary["probe"] == lines[-1]["probe"]
    assert summary["probed"] == {"images": 300, "fitted_on": 250, "classes": 10}
    assert "probed" not in summary_of(tmp_path / "without")
    assert encoder("with") == encoder("without")


def test_fewer_held_out_images_than_ranks_are_named_as_such(digits):
    config = load_config(PretrainConfig, CONFIG, [f"data.path={digits}"])
    few, enough = (open_data(config, Ranks(0, n, 0, n), torch.device("cpu")) for n in (400, 4))
    assert few.held_out_index is None
    assert "400 ranks" in few.why_none
    assert few.probe_split.why_none == few.why_none
    assert few.held_out(Ranks(), images=8, batch_size=4) is None
    assert enough.held_out_index is not None
