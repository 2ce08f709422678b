"""The mode "linear_probe": what it trains, how it chooses, what it leaves and what it refuses."""

import json
import math
import re

import numpy as np
import pytest
import timm
import torch
from helpers.commands import ROOT, one_line, summary_of
from safetensors.torch import load_file
from torch import nn

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder
from mae_vit.finetuning.command import main
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.frozen import linear_probe, score
from mae_vit.runtime.ranks import ALONE

pytestmark = pytest.mark.timeout(60)
SHORT = [
    "data.labels_per_class=40",
    "train.effective_batch_size=64",
    "train.epochs=8",
    "train.warmup_epochs=1",
]


@pytest.fixture
def probe(digits, pretrained, tmp_path):
    """Probes the pretrained encoder on the digits: probe("key=value", ..., name="run")."""

    def run(*arguments, name="run", ckpt=pretrained) -> int:
        place = [f"data.path={digits}", f"run.dir={tmp_path / name}", "run.name=probe", "model.img_size=8"]
        config = str(ROOT / "configs" / "finetune" / "linear_probe_cifar_tiny.yaml")
        return main(["--config", config, "--ckpt", str(ckpt), *SHORT, *place, *arguments])

    return run


def classifier(pretrained, folder, **options) -> nn.Module:
    """The start's encoder with the probe's layer, in timm alone."""
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=10,
        **options,
    )
    weights = load_file(pretrained / "encoder.safetensors") | load_file(folder / "linear.safetensors")
    model.load_state_dict(weights, strict=True)
    return model.eval()


def normalized(digits, split: str) -> torch.Tensor:
    from mae_vit.data.images.decode import decode

    index = open_index(digits, split)
    images = torch.from_numpy(np.stack([decode(index.read(n), 1) for n in range(len(index))])).float() / 255
    return (images - index.dataset.mean[0]) / index.dataset.std[0]


def test_a_run_leaves_what_it_promises(probe, digits, pretrained, tmp_path, capsys):
    before = {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()}
    assert probe() == 0
    folder, output = tmp_path / "run", capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "config.yaml",
        "environment.json",
        "plan.txt",
        "summary.json",
        "results.json",
        "predictions.csv",
        "linear.safetensors",
    }
    assert "100.0% of the encoder's parameters" in output
    summary, results = summary_of(folder), json.loads((folder / "results.json").read_text())
    assert (summary["status"], summary["mode"]) == ("done", "linear_probe")
    assert (summary["train_size"], summary["val_size"]) == (360, 40)
    for name in ("train_top1", "val_top1", "test_top1", "test_top5", "calibration_error"):
        assert math.isfinite(summary[name]), name
        assert 0 <= summary[name] <= 1, name
    # Even random features tell digits apart far above the 10 % of chance.
    assert summary["test_top1"] > 0.2
    assert summary["train_test_gap"] == pytest.approx(summary["train_top1"] - summary["test_top1"])
    rates = results["probe_rates"]
    assert [row["factor"] for row in rates] == [0.1, 0.3, 1.0, 3.0, 10.0]
    assert [row["lr"] for row in rates] == pytest.approx([0.0025, 0.0075, 0.025, 0.075, 0.25])
    best = max(rates, key=lambda row: row["val_top1"])
    assert (summary["probe_lr"], summary["val_top1"]) == (best["lr"], best["val_top1"])
    assert f"rate {best['lr']:<9.3g} held-out {best['val_top1']:.2%}, chosen" in output
    with torch.no_grad():
        logits = classifier(pretrained, folder, global_pool="avg", fc_norm=False)(normalized(digits, "test"))
    labels = open_index(digits, "test").labels
    assert (logits.argmax(dim=-1).numpy() == labels).mean() == pytest.approx(summary["test_top1"])
    assert probe() == 0
    assert "is finished; results: " in capsys.readouterr().out
    assert {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()} == before


def test_a_batch_larger_than_the_data_shrinks_with_a_note(probe, tmp_path, capsys):
    assert probe("train.effective_batch_size=512") == 0
    (note,) = summary_of(tmp_path / "run")["notes"]
    assert note.endswith("has 360 images to train on: a batch is 256 images, the largest power of two")
    assert f"note: {note}" in capsys.readouterr().out
    assert f"note: {note}" in (tmp_path / "run" / "plan.txt").read_text()


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_the_layer_is_that_of_a_plain_loop(probe, digits, pretrained, tmp_path, pool, monkeypatch):
    """timm's encoder, torch's BatchNorm, SGD and cross-entropy, in the run's order of images."""
    choices = {}
    monkeypatch.setattr(
        FinetuneData,
        "open_test",
        lambda data: choices.update(train=data.train, held=data.held_out) or opened(data),
    )
    assert probe("finetune.lr_factors=[3.0]", f"finetune.pool={pool}", "run.seed=4") == 0
    more = {"global_pool": "token"} if pool == "cls" else {"global_pool": "avg", "fc_norm": False}
    model = classifier(pretrained, tmp_path / "run", **more)
    with torch.no_grad():
        features = model.forward_head(model.forward_features(normalized(digits, "train")), pre_logits=True)
    labels = torch.from_numpy(np.asarray(open_index(digits, "train").labels).astype(np.int64))
    train = choices["train"]
    assert not set(train) & set(choices["held"])
    torch.manual_seed(0)
    layer = nn.Sequential(nn.BatchNorm1d(16, affine=False, eps=1e-6), nn.Linear(16, 10))
    for parameter in layer[1].parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    order = GlobalOrder(len(train), 64, 4)
    total, warmup = 8 * order.steps_per_epoch, order.steps_per_epoch
    for step in range(total):
        epoch, at = divmod(step, order.steps_per_epoch)
        places = train[order.samples(epoch, 64 * at, 64 * (at + 1))]
        rate = 0.075 * step / warmup
        if step >= warmup:
            rate = 0.0375 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(features[places]), labels[places]).backward()
        optimizer.step()
    layer.eval()
    saved = load_file(tmp_path / "run" / "linear.safetensors")
    with torch.no_grad():
        expected, logits = layer(features), features @ saved["head.weight"].T + saved["head.bias"]
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    top1 = (expected.argmax(-1) == labels)[torch.from_numpy(choices["held"])].double().mean().item()
    assert summary_of(tmp_path / "run")["val_top1"] == pytest.approx(top1, abs=0.01)


opened = FinetuneData.open_test


@pytest.fixture
def without_twin(monkeypatch):
    """The run's own features alone: random weights come after them, and read the test split once, too."""
    monkeypatch.setattr("mae_vit.finetuning.frozen.score.open_untrained_twin", lambda *arguments: None)


def test_held_out_images_choose_the_rate_before_the_test_split_is_opened(
    probe, tmp_path, monkeypatch, without_twin
):
    asked, reads = [], []
    scores = iter([0.2, 0.9, 0.4, 0.9, None])

    def score(layer, features, labels):
        assert not reads
        asked.append(len(labels))
        return next(scores)

    def open_test(data):
        reads.append(len(asked))
        return opened(data)

    monkeypatch.setattr(FinetuneData, "open_test", open_test)
    monkeypatch.setattr(linear_probe, "probe_top1", score)
    assert probe() == 0
    summary = summary_of(tmp_path / "run")
    assert asked == [summary["val_size"]] * 5
    assert (summary["probe_lr"], summary["val_top1"]) == (pytest.approx(0.0075), 0.9)
    assert [row["val_top1"] for row in summary["probe_rates"]] == [0.2, 0.9, 0.4, 0.9, None]
    weights = (tmp_path / "run" / "linear.safetensors").read_bytes()
    assert reads == [5]
    monkeypatch.undo()
    assert probe("finetune.lr_factors=[0.3]", name="alone") == 0
    assert (tmp_path / "alone" / "linear.safetensors").read_bytes() == weights


def test_scores_are_kept_where_random_weights_cannot_be_measured(probe, tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("mae_vit.finetuning.frozen.score.open_untrained_twin", fail)
    assert probe() == 0
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "done"
    assert summary["test_top1"] is not None
    assert "random_weights_top1" not in summary
    expected = "random weights could not be measured to compare with: out of memory"
    assert expected in summary["notes"]
    assert expected in "".join(capsys.readouterr())


def test_where_one_rank_cannot_open_random_weights_none_measures_them(monkeypatch):
    monkeypatch.setattr(score, "gather_objects", lambda why, ranks: [why, "out of memory"])
    with pytest.raises(InputError, match=r"^out of memory$"):
        score._open_on_all(lambda: None, ALONE)


def test_the_test_split_is_read_once_or_not_at_all(
    probe, digits, tmp_path, capsys, monkeypatch, without_twin
):
    from mae_vit.data.batches.augmented import AugmentedSource

    seen: list[int] = []
    render = AugmentedSource.render

    def counted(source, seed, epoch, places, *more, **options):
        if source.source.index.split == "test":
            seen.extend(places)
        return render(source, seed, epoch, places, *more, **options)

    monkeypatch.setattr(AugmentedSource, "render", counted)
    assert probe("finetune.test=false", name="unread") == 0
    assert not seen
    assert "the test split was not read" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "unread").iterdir()} == {
        ".lock",
        "config.yaml",
        "environment.json",
        "plan.txt",
        "summary.json",
        "linear.safetensors",
    }
    summary = summary_of(tmp_path / "unread")
    assert summary["val_top1"] > 0
    assert not any(name.startswith("test_top") for name in summary)
    assert probe() == 0
    assert sorted(seen) == list(range(len(open_index(digits, "test"))))


def test_without_held_out_images_there_is_one_rate(probe, tmp_path):
    assert probe("finetune.holdout=0", "finetune.lr_factors=[1.0]") == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["train_size"], summary["val_size"], summary["val_top1"]) == (400, 0, None)
    assert summary["probe_rates"][0]["val_top1"] is None


SEEN: list[bytes] = []


@pytest.mark.parametrize(
    "change",
    [
        "",
        "run.seed=5",
        "optim.blr=0.2",
        "optim.momentum=0.5",
        "optim.weight_decay=0.1",
        "optim.min_lr=0.001",
        "optim.name=lars",
        "optim.name=adamw",
        "train.effective_batch_size=128",
        "train.epochs=9",
        "train.warmup_epochs=0",
        "train.precision=bf16",
        "data.labels_per_class=30",
        "finetune.holdout=0.3",
        "finetune.pool=cls",
        "finetune.head_init=small",
        "finetune.label_smoothing=0.1",
        "finetune.lr_factors=[3.0]",
    ],
)
def test_every_option_changes_the_layer_and_an_equal_run_does_not(probe, tmp_path, change):
    fixed = ["finetune.lr_factors=[1.0]", "train.epochs=2", "finetune.test=false"]
    assert probe(*fixed, *change.split()) == 0
    content = (tmp_path / "run" / "linear.safetensors").read_bytes()
    assert content not in SEEN
    SEEN.append(content)
    if not change:
        assert probe(*fixed, "data.source=tar", "finetune.train_images=40", name="again") == 0
        assert (tmp_path / "again" / "linear.safetensors").read_bytes() == content
        one, other = summary_of(tmp_path / "run"), summary_of(tmp_path / "again")
        assert one["val_top1"] == other["val_top1"]
        assert other["train_images_measured"] == 40


BAD = {
    "augmentation": (
        ["data.augment.flip=true", "data.augment.crop=pad"],
        "data.augment.crop=pad, data.augment.pad_px=4, data.augment.flip=true: no effect with",
    ),
    "decay by layers": (["optim.layer_decay=0.8"], "optim.layer_decay=0.8: no effect"),
    "clipping": (["optim.clip_grad=1.0"], "optim.clip_grad=1.0: no effect"),
    "noise": (["model.drop_path_rate=0.1"], "model.drop_path_rate=0.1: no effect"),
    "checkpoints": (["checkpoint.every_steps=9"], "checkpoint.every_steps=9: no effect"),
    "guard": (["guard.skip_steps=9"], "guard.skip_steps=9: no effect"),
    "monitoring": (["monitor.log_every_steps=9"], "monitor.log_every_steps=9: no effect"),
    "engine": (["train.zero_stage=1"], "train.zero_stage=1: no effect"),
    "shots": (["finetune.shots=[3]"], 'shots has no effect with mode="linear_probe"'),
    "no rate": (["finetune.lr_factors=[]"], "finetune.lr_factors"),
    "rate of nothing": (["finetune.lr_factors=[1.0, 0.0]"], "above 0 each"),
    "nothing to choose by": (["finetune.holdout=0"], "leaves nothing to choose among lr_factors"),
    "few labels": (["data.labels_per_class=1"], "leaves 0 to choose the rate by"),
    "batch of one": (["train.effective_batch_size=1"], "needs 2 images or more"),
    "batch larger than the data in a comparison": (
        ["train.effective_batch_size=512", "--same-batch"],
        "larger than the data",
    ),
    "end above the peak": (["optim.min_lr=0.02"], "above the lowest peak rate 0.0025 of finetune.lr_factors"),
    "other mode": (["finetune.mode=knn", "finetune.lr_factors=[1.0]"], 'it belongs to mode="linear_probe"'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_one_line_and_write_nothing(probe, tmp_path, capsys, name):
    arguments, expected = BAD[name]
    assert probe(*arguments) == 2
    assert expected in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_shards_elsewhere_come_into_the_cache_that_is_asked_for():
    elsewhere = ["data.path=https://host/mine", "data.cache_dir=/local", "data.cache_gib=9"]
    config = load_config(
        FinetuneConfig, ROOT / "configs" / "finetune" / "linear_probe_cifar_tiny.yaml", elsewhere
    )
    assert (config.data.cache_dir, config.data.cache_gib) == ("/local", 9)


def test_rates_that_are_all_too_large_are_one_line(probe, capsys):
    assert probe("finetune.lr_factors=[1.0e+39]") == 2
    assert "are too large for these features: give smaller ones" in capsys.readouterr().err


def test_another_run_in_the_folder_is_refused(probe, tmp_path, capsys):
    assert probe() == 0
    before = (tmp_path / "run" / "results.json").read_bytes()
    assert probe("train.epochs=9") == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert (tmp_path / "run" / "results.json").read_bytes() == before


def test_a_run_folder_alone_has_its_recipe(pretrained, tmp_path, capsys):
    arguments = ["--ckpt", str(pretrained), "finetune.mode=linear_probe", f"run.dir={tmp_path / 'run'}"]
    assert main([*arguments, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "GFLOP per image" in plan
    assert re.search(r"rates +0.01, 0.03, 0.1, 0.3, 1 after", plan)
    assert not (tmp_path / "run").exists()


def test_a_comparison_takes_the_mode_with_a_config_of_its_own(digits, tmp_path):
    from mae_vit.finetuning.comparison.checks import check
    from mae_vit.finetuning.comparison.config import CompareConfig
    from mae_vit.finetuning.comparison.plan import ComparisonPlan

    path = tmp_path / "compare.yaml"
    path.write_text(
        f"""run: {{name: probes}}
data: {{path: {digits}}}
set: {{model.img_size: 8, model.in_chans: 1}}
entries:
  - {{name: linear, config: {ROOT}/configs/finetune/linear_probe_cifar_tiny.yaml, modes: [linear_probe]}}
  - {{name: tuned, config: {ROOT}/configs/finetune/finetune_cifar_tiny.yaml}}
reference: tuned
tune: [{{optim.layer_decay: 0.8}}, {{optim.layer_decay: 0.65}}]
"""
    )
    plan = ComparisonPlan(load_config(CompareConfig, path), tmp_path, tmp_path / "out")
    check(plan)
    cell = next(cell for cell in plan.cells if cell.mode == "linear_probe")
    assert 'finetune.mode="linear_probe"' in cell.run.command()
    assert "--same-batch" in cell.run.command()
    assert not any("layer_decay" in word for word in cell.run.command())
