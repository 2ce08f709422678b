"""The mode "linear_probe": what it trains, how it chooses, what it leaves and what it refuses."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from helpers.commands import summary_of
from safetensors.torch import load_file
from torch import nn

from mae_vit.core.errors import InputError
from mae_vit.data.images.decode import decode
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.frozen import linear_probe, score
from mae_vit.runtime.ranks import ALONE

SHORT = [
    "data.labels_per_class=40",
    "train.effective_batch_size=64",
    "train.epochs=8",
    "train.warmup_epochs=1",
    # What plain code in float32 is compared with, on processors with bf16 too.
    "train.precision=fp32",
]
FILES = {".lock", "config.yaml", "environment.json", "plan.txt", "summary.json", "linear.safetensors"}


@pytest.fixture
def probe(call, pretrained):
    """Probes the pretrained encoder on the digits: probe("key=value", ..., name="run")."""
    return partial(call, *SHORT, ckpt=pretrained, config="linear_probe_cifar_tiny", small=())


def classifier(pretrained, folder, **options) -> nn.Module:
    """The pretrained encoder with the probe's layer, in timm alone."""
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes, **options)
    weights = load_file(pretrained / "encoder.safetensors") | load_file(folder / "linear.safetensors")
    model.load_state_dict(weights, strict=True)
    return model.eval()


def normalized(digits, split: str) -> torch.Tensor:
    index = open_index(digits, split)
    images = torch.from_numpy(np.stack([decode(index.read(n), 1) for n in range(len(index))])).float() / 255
    return (images - index.dataset.mean[0]) / index.dataset.std[0]


def test_a_run_leaves_what_it_promises(probe, digits, pretrained, tmp_path, capsys):
    assert probe() == 0
    folder, output = tmp_path / "run", capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == FILES | {"results.json", "predictions.csv"}
    assert "100.0%" in output
    summary, results = summary_of(folder), json.loads((folder / "results.json").read_text())
    assert (summary["status"], summary["mode"]) == ("done", "linear_probe")
    assert (summary["train_size"], summary["val_size"]) == (360, 40)
    for name in ("train_top1", "val_top1", "test_top1", "test_top5", "calibration_error"):
        assert 0 <= summary[name] <= 1, name
    # Even random features tell digits apart far above the 10 % of chance.
    assert summary["test_top1"] > 0.2
    rates = results["probe_rates"]
    assert [row["factor"] for row in rates] == [0.1, 0.3, 1.0, 3.0, 10.0]
    assert [row["lr"] for row in rates] == pytest.approx([0.0025, 0.0075, 0.025, 0.075, 0.25])
    best = max(rates, key=lambda row: row["val_top1"])
    assert (summary["probe_lr"], summary["val_top1"]) == (best["lr"], best["val_top1"])
    assert f"rate {best['lr']:<9.3g} validation {best['val_top1']:.2%}, chosen" in output
    with torch.no_grad():
        logits = classifier(pretrained, folder, global_pool="avg", fc_norm=False)(normalized(digits, "test"))
    labels = open_index(digits, "test").labels
    assert (logits.argmax(dim=-1).numpy() == labels).mean() == pytest.approx(summary["test_top1"])
    assert probe() == 0
    assert "is finished; results: " in capsys.readouterr().out
    assert probe("train.epochs=9") == 2
    assert "has other settings" in capsys.readouterr().err


def test_the_layer_is_that_of_a_plain_loop(probe, digits, pretrained, tmp_path, spy):
    """timm's encoder, torch's BatchNorm, SGD and cross-entropy, in the run's order of images."""
    choices = {}
    spy(FinetuneData, "open_test", lambda data: choices.update(train=data.train, held=data.held_out))
    smoothed = ["finetune.pool=cls", "finetune.label_smoothing=0.2"]
    assert probe("finetune.lr_factors=[3.0]", "run.seed=4", *smoothed) == 0
    model = classifier(pretrained, tmp_path / "run", global_pool="token")
    with torch.no_grad():
        features = model.forward_head(model.forward_features(normalized(digits, "train")), pre_logits=True)
    labels = torch.from_numpy(np.asarray(open_index(digits, "train").labels).astype(np.int64))
    train = choices["train"]
    assert not set(train) & set(choices["held"])
    layer = nn.Sequential(nn.BatchNorm1d(16, affine=False, eps=1e-6), nn.Linear(16, 10))
    for parameter in layer[1].parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    order = GlobalOrder(len(train), 64, 4)
    total, warmup = 8 * order.steps_per_epoch, order.steps_per_epoch
    for step in range(total):
        epoch, at = divmod(step, order.steps_per_epoch)
        samples = train[order.samples(epoch, 64 * at, 64 * (at + 1))]
        rate = 0.075 * step / warmup
        if step >= warmup:
            rate = 0.0375 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        logits = layer(features[samples])
        nn.functional.cross_entropy(logits, labels[samples], label_smoothing=0.2).backward()
        optimizer.step()
    layer.eval()
    saved = load_file(tmp_path / "run" / "linear.safetensors")
    with torch.no_grad():
        expected, logits = layer(features), features @ saved["head.weight"].T + saved["head.bias"]
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    top1 = (expected.argmax(-1) == labels)[torch.from_numpy(choices["held"])].double().mean().item()
    assert summary_of(tmp_path / "run")["val_top1"] == pytest.approx(top1, abs=0.01)


def test_held_out_images_choose_the_rate_before_the_test_split_is_opened(probe, tmp_path, monkeypatch, spy):
    asked, reads = [], []
    scores = iter([0.2, 0.9, 0.4, 0.9, None])

    def top1(layer, features, labels):
        if reads:  # of random weights, which come after
            return 0.1
        asked.append(len(labels))
        return next(scores)

    spy(FinetuneData, "open_test", lambda data: reads.append(len(asked)))
    monkeypatch.setattr(linear_probe, "probe_top1", top1)
    assert probe() == 0
    summary = summary_of(tmp_path / "run")
    assert asked == [summary["val_size"]] * 5
    assert (summary["probe_lr"], summary["val_top1"]) == (pytest.approx(0.0075), 0.9)
    assert [row["val_top1"] for row in summary["probe_rates"]] == [0.2, 0.9, 0.4, 0.9, None]
    assert reads[0] == 5
    monkeypatch.undo()
    assert probe("finetune.lr_factors=[0.3]", name="alone") == 0
    weights = [(tmp_path / name / "linear.safetensors").read_bytes() for name in ("run", "alone")]
    assert weights[0] == weights[1]


def test_scores_are_kept_where_random_weights_cannot_be_measured(probe, tmp_path, monkeypatch, capsys):
    before = score.open_frozen

    def fail(setup, *, random=False, **options):
        if random:
            raise RuntimeError("out of memory")
        return before(setup, **options)

    monkeypatch.setattr(score, "open_frozen", fail)
    assert probe() == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], "random_weights_top1" in summary) == ("done", False)
    assert summary["test_top1"] is not None
    (note,) = summary["notes"]
    assert note.endswith(": out of memory")
    assert note in capsys.readouterr().out


def test_where_one_rank_cannot_open_random_weights_none_measures_them(monkeypatch):
    monkeypatch.setattr(score, "gather_objects", lambda why, ranks: [why, "out of memory"])
    monkeypatch.setattr(score, "open_frozen", lambda *arguments, **options: None)
    with pytest.raises(InputError, match=r"^out of memory$"):
        score._open_on_all(SimpleNamespace(ranks=ALONE))


def test_the_test_split_is_not_read_without_being_asked_for(probe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FinetuneData, "open_test", None)
    assert probe("finetune.test=false") == 0
    assert "(finetune.test=false)" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES
    summary = summary_of(tmp_path / "run")
    assert summary["val_top1"] > 0
    assert not any(name.startswith("test_top") for name in summary)


def test_without_held_out_images_there_is_one_rate(probe, tmp_path):
    assert probe("finetune.holdout=0", "finetune.lr_factors=[1.0]") == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["train_size"], summary["val_size"], summary["val_top1"]) == (400, 0, None)
    assert summary["probe_rates"][0]["val_top1"] is None


@pytest.mark.parametrize(("optimizer", "std"), [("sgd", 0.0), ("lars", 0.01)])
def test_the_layer_begins_as_its_optimizer_needs(probe, monkeypatch, optimizer, std):
    """The norm of the weights is a factor of LARS's steps. The official MAE code draws them with std 0.01."""
    begun = []
    monkeypatch.setattr(linear_probe, "train_probe", lambda probe, *_, **__: begun.append(probe.eval()))
    assert probe(f"optim.name={optimizer}", "finetune.lr_factors=[1.0]", "finetune.test=false") == 0
    assert begun[0].head.weight.std().item() == pytest.approx(std, rel=0.2)
    assert not begun[0].head.bias.any()


def test_lars_on_few_images_is_advised_against(probe, capsys, said):
    assert probe("train.effective_batch_size=512", "--dry-run") == 0
    assert "optim.name=" not in capsys.readouterr().out.partition("note:")[2]
    assert probe("train.effective_batch_size=512", "optim.name=lars", "--dry-run") == 0
    note = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("note: optim.name="))
    said(note)
    assert probe(*note.split()[-2:], "--dry-run") == 0
    assert "of warm-up, cosine to 0; sgd" in capsys.readouterr().out


def test_every_option_changes_the_layer_and_an_equal_run_does_not(probe, tmp_path):
    fixed = ["finetune.lr_factors=[1.0]", "train.epochs=2", "finetune.test=false"]
    changes = (
        [],
        ["run.seed=5", "finetune.head_init=small"],
        ["optim.momentum=0.5", "optim.min_lr=0.001"],
        ["optim.name=lars", "train.warmup_epochs=0"],
        ["finetune.label_smoothing=0.1"],
        ["finetune.lr_factors=[3.0]"],
    )
    seen = []
    for number, change in enumerate(changes):
        assert probe(*fixed, *change, name=str(number)) == 0
        seen.append((tmp_path / str(number) / "linear.safetensors").read_bytes())
    assert len(set(seen)) == len(changes)
    assert probe(*fixed, "data.source=tar", name="again") == 0
    assert (tmp_path / "again" / "linear.safetensors").read_bytes() == seen[0]


@pytest.mark.parametrize(
    "words",
    [
        *("train.effective_batch_size=512 --same-batch", "train.effective_batch_size=1"),
        *("optim.min_lr=0.02", "finetune.lr_factors=[1.0e+39]"),
    ],
)
def test_bad_settings_are_one_line(probe, capsys, words, said):
    assert probe(*words.split()) == 2
    said(capsys.readouterr().err.splitlines()[-1])
