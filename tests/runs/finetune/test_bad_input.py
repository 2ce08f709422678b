"""Bad input to finetune/run.py: one line, exit code 2, nothing written."""

import json
import re
import shutil

import pytest
from helpers.commands import one_line

from mae_vit.finetuning.config.pretrained import run_name

pytestmark = pytest.mark.timeout(60)

CASES = {
    "misspelled key": (["finetune.pol=mean"], 'unknown key "finetune.pol": did you mean "finetune.pool"'),
    "misspelled model key": (
        ["model.patchsize=2"],
        'unknown key "model.patchsize": did you mean "model.patch_size"',
    ),
    "wrong mode": (["finetune.mode=linear"], "finetune.mode='linear'"),
    "unknown model": (["model.name=SimpelCNN"], 'did you mean "SimpleCNN"?'),
    "holdout of all": (["finetune.holdout=0.9"], "finetune.holdout=0.9"),
    "holdout of nothing": (["data.labels_per_class=1"], "leaves 0 to choose the epoch by"),
    "too many labels": (["data.labels_per_class=9999"], "more than any class has"),
    "shots beyond labels": (
        ["data.labels_per_class=20", "finetune.mode=few_shot", "finetune.shots=[5,25]"],
        'class "0" has 20 labeled images: give finetune.shots=[5]',
    ),
    "test split that is trained on": (["finetune.test_split=train"], "give another split (test)"),
    "unknown test split": (["finetune.test_split=tst"], 'no split "tst"'),
    "pretraining's init": (["model.init=x"], "give weights to begin from by --ckpt"),
    "pretraining's probe": (["monitor.probe_every_steps=3"], "no effect in fine-tuning"),
    "pretraining's held-out images": (["monitor.evaluate_images=9"], "no effect in fine-tuning"),
    "layer decay": (["optim.layer_decay=1.5"], "optim.layer_decay=1.5"),
    "start as an override": (["finetune.start=runs/mae"], "weights to begin from are given by --ckpt"),
    "no start": (["--ckpt", ""], "a path is empty: is a variable unset?"),
    "neighbors of another mode": (["finetune.neighbors=3"], 'neighbors has no effect with mode="finetune"'),
    "pretraining's left-out images": (["data.leave_out_per_class=5"], "fine-tuning takes labels_per_class"),
    "missing start": (["--ckpt", "nowhere"], "start nowhere does not exist"),
    "batch larger than the data in a comparison": (
        ["data.labels_per_class=2", "train.effective_batch_size=64", "--same-batch"],
        "larger than the data",
    ),
    "nothing measured": (["finetune.test=false", "finetune.holdout=0"], "leaves nothing to measure"),
    "half a pair": (
        ["finetune.mixup=0.8", "train.effective_batch_size=63"],
        "micro-batches of 63 images are no whole groups of 2 (nearest: train.effective_batch_size=64",
    ),
    "average of shards": (["train.ema_decay=0.9", "train.zero_stage=3"], "zero_stage=3 shards them"),
    "nobody to learn from": (["finetune.distillation=soft"], "distillation has no effect without a teacher"),
    "temperature of a choice": (
        ["finetune.teacher=x", "finetune.pool=cls", "finetune.distillation_temperature=2.0"],
        'distillation_temperature has no effect with distillation="hard"',
    ),
    "token beside the mean": (["finetune.teacher=x"], 'teacher needs pool="cls"'),
    "missing teacher": (
        ["finetune.teacher=nowhere", "finetune.pool=cls"],
        "finetune.teacher=nowhere: cannot read nowhere: no such file",
    ),
    "picture bands": (["monitor.picture_bands=[7]"], "picture band 7 is none of 1 to 1"),
    "ranks": (["train.engine=torch", "train.zero_stage=1"], 'zero_stage=1 needs engine="deepspeed"'),
}
NETWORK_CASES = {
    "pool": (["finetune.pool=cls"], 'model.name="SimpleCNN" has no class token'),
    "teacher": (["finetune.teacher=x", "finetune.pool=cls"], 'finetune.teacher needs model.family="vit"'),
    "frozen projection": (["finetune.freeze_patch_embed=true"], "finetune.freeze_patch_embed has no effect"),
    "frozen": (["finetune.mode=knn"], "needs a Vision Transformer"),
    "drop path": (["model.drop_path_rate=0.1"], "drop_path_rate has no effect"),
    "recomputation": (
        ["train.activation_checkpointing=true"],
        "has no effect on a network without transformer blocks",
    ),
    "unknown architecture": (["model.name=timm:resnet19"], 'did you mean "resnet18"'),
    "architecture that does not fit": (
        ["model.name=timm:vit_tiny_patch16_224"],
        "does not take 1 x 8 x 8 images",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_config(call, tmp_path, capsys, name):
    arguments, expected = CASES[name]
    assert call(*arguments) == 2
    assert expected in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_network_without_patches_has_none_of_their_keys(call, capsys):
    assert call("model.name=SimpleCNN") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("model.")[2].split()[0] for line in lines] == ["embed_dim", "depth", "num_heads"]
    assert all('belongs to model "vit" or "vit_rope"' in line for line in lines)


@pytest.mark.parametrize("name", NETWORK_CASES)
def test_networks(call, tmp_path, capsys, name):
    arguments, expected = NETWORK_CASES[name]
    model = ["model.img_size=8", "model.in_chans=1"]
    assert call(*arguments, config="simple_cnn_cifar", model=model) == 2
    assert expected in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_network_has_no_start(call, pretrained, tmp_path, capsys):
    assert call("model.img_size=8", config="simple_cnn_cifar", ckpt=pretrained) == 2
    assert 'model.name="SimpleCNN" does not fit --ckpt' in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_fine_tuned_network_is_where_another_run_begins(call, tmp_path, capsys):
    short = ["train.steps=1", "train.warmup_steps=0"]
    model = ["model.img_size=8", "model.in_chans=1"]
    assert call(*short, config="simple_cnn_cifar", model=model, name="cnn") == 0
    for name in ("of its file", "of its checkpoint"):
        capsys.readouterr()
        model = ["model.img_size=8"]
        assert (
            call(*short, config="simple_cnn_cifar", ckpt=tmp_path / "cnn", model=model, name=name.split()[-1])
            == 0
        )
        assert "100.0% of the encoder's parameters" in capsys.readouterr().out
        (tmp_path / "cnn" / "model.safetensors").unlink(missing_ok=True)


def test_data_without_labels_or_test_split(call, digits, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(digits, data, ignore=shutil.ignore_patterns(".index"))
    described = json.loads((data / "dataset.json").read_text())
    only = {**described, "splits": {"train": described["splits"]["train"]}}
    (data / "dataset.json").write_text(json.dumps(only))
    assert call(f"data.path={data}") == 2
    assert 'has no split "test" or "val" to measure on (train)' in one_line(capsys)


def test_a_frozen_run_does_not_replace_another(call, pretrained, tmp_path, capsys):
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    before = (tmp_path / "run" / "results.json").read_bytes()
    capsys.readouterr()
    assert call("finetune.mode=few_shot", ckpt=pretrained) == 2
    assert "belongs to another run" in (line := one_line(capsys))
    # A dry run scores nothing there: it says what the run will do.
    assert call("finetune.mode=few_shot", "--dry-run", ckpt=pretrained) == 0
    *_, warning, end = capsys.readouterr().out.splitlines()
    assert warning == f"warning: the run itself will stop: {line.removeprefix('error: ')}"
    assert end == "all other checks passed; nothing was scored"
    assert (tmp_path / "run" / "results.json").read_bytes() == before


def test_fine_tuning_does_not_replace_a_frozen_run(call, pretrained, tmp_path, capsys):
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    before = (tmp_path / "run" / "summary.json").read_bytes()
    capsys.readouterr()
    assert call(ckpt=pretrained) == 2
    assert "holds a finished run that left no checkpoints" in capsys.readouterr().err.splitlines()[-1]
    assert call("--dry-run", ckpt=pretrained) == 0
    *_, warning, _ = capsys.readouterr().out.splitlines()
    assert re.match(
        "warning: the run itself will stop: .* holds a finished run that left no checkpoints", warning
    )
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_how_often_the_epoch_is_chosen_is_part_of_the_run(call, tmp_path, capsys):
    assert call() == 0
    capsys.readouterr()
    assert call("monitor.evaluate_every_steps=3") == 2
    assert "finetune.evaluate_every_steps was 2, now 3" in one_line(capsys)
    assert call("--dry-run") == 0
    assert re.search(
        r"^run .*is finished \(step \d+\): nothing is left", capsys.readouterr().out, re.MULTILINE
    )


def test_the_test_split_is_not_read_without_being_asked_for(call, tmp_path, capsys):
    assert call("finetune.test=false") == 0
    assert "the test split was not read" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_top1"] > 0
    assert not any(name.startswith("test_top") for name in summary)
    assert not (tmp_path / "run" / "predictions.csv").exists()


def test_extend_belongs_to_training(call, capsys):
    assert call("finetune.mode=knn", "--extend") == 2
    assert one_line(capsys) == 'error: --extend has no effect with finetune.mode="knn"'


def test_starts_have_names_of_their_own(tmp_path):
    """They name run folders."""
    (tmp_path / "weights.v1.pth").touch()
    starts = (
        "runs/mae_v1.5",
        "runs/mae_v1.6",
        "timm:vit_base_patch16_224.dino",
        "timm:vit_base_patch16_224.augreg",
    )
    assert [run_name(start) for start in starts] == [
        start.removeprefix("runs/").removeprefix("timm:") for start in starts
    ]
    assert run_name("runs/mae_v1.5/encoder.safetensors") == "mae_v1.5"
    assert run_name(str(tmp_path / "weights.v1.pth")) == "weights.v1"


def test_a_dry_run_says_what_is_measured_on(call, capsys):
    assert call("--dry-run") == 0
    output = capsys.readouterr().out
    assert "300 images, once, at the end" in output
    assert re.search(r"^cores       \d+, 0 workers for each of 1 rank$", output, re.MULTILINE)
    assert call("--dry-run", "finetune.test=false") == 0
    output = capsys.readouterr().out
    assert "nothing (finetune.test=false)" in output
    assert "free: " in output
