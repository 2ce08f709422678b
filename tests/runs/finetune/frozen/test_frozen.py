"""Runs on frozen features: whose features, which options, whose folder, and how they end."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, one_line
from helpers.finetune import SMALL, TINY
from mae_vit.finetuning.frozen.initial_model import load_frozen
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mae_vit.finetuning.command import main
from mae_vit.finetuning.frozen import score as frozen
from mae_vit.finetuning.models.classifiers import ViTClassifier
from mae_vit.models.encoders.base import pool_tokens
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.encoder import load_encoder
from mae_vit.weights.read import read_weights


def classifier(pool: str) -> ViTClassifier:
    encoder = ViTEncoder(img_size=(8, 8), patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    return ViTClassifier(encoder, pool=pool, head_init="zero", mean=[0.5], std=[0.2], labels=LabelLoss(10))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_features_are_those_that_the_encoder_gives_elsewhere(call, pretrained, tmp_path, pool):
    """Of a pretrained start and of one that was fine-tuned on the mean, whose norm stands behind it."""
    assert call(f"finetune.pool={pool}", ckpt=pretrained, name="tuned") == 0
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for path in (pretrained, tmp_path / "tuned"):
        start = read_weights(str(path))
        model = classifier(pool).eval()
        coverage = load_frozen(model, start)
        assert coverage is not None
        assert not coverage.random
        assert not any(name.startswith(("norm", "fc_norm")) for name in coverage.skipped)
        expected = load_encoder(path, pool=pool)(images)
        features = model.fc_norm(pool_tokens(model.encoder, model.encoder.forward_features(images), pool))
        torch.testing.assert_close(features, expected)


@pytest.mark.parametrize("mode", ["knn", "few_shot", "linear_probe"])
def test_random_weights_are_measured_beside_the_pretrained_ones(
    call, digits, pretrained, tmp_path, capsys, mode
):
    """What they reach is what a run without --ckpt reaches."""

    def measure(name, *start) -> tuple[dict, str]:
        if mode == "linear_probe":
            config = str(ROOT / "configs" / "finetune" / "linear_probe_cifar_tiny.yaml")
            short = ["train.epochs=1", "train.warmup_epochs=0.5", "train.effective_batch_size=64"]
            place = [f"data.path={digits}", f"run.dir={tmp_path / name}", "finetune.test=false"]
            geometry = ["model.img_size=8"] if start else TINY
            assert main(["--config", config, *start, *geometry, *short, *place]) == 0
        else:
            assert call(f"finetune.mode={mode}", "finetune.pool=mean", *start, name=name) == 0
        return json.loads((tmp_path / name / "summary.json").read_text()), capsys.readouterr().out

    top1 = "val_top1" if mode == "linear_probe" else "test_top1"
    summary, out = measure("run", "--ckpt", str(pretrained))
    low, high = summary["interval_95"]
    assert 0 <= low < summary[top1] < high <= 1
    assert f"  95 %      {low:.1%} to {high:.1%}, with other " in out
    assert f"random weights has {summary['random_weights_top1']:.2%}: " in out
    alone, out = measure("random")
    assert summary["random_weights_top1"] == alone[top1]
    assert "random_weights_top1" not in alone
    assert "random weights has" not in out


def test_options_that_do_nothing_are_named(call, pretrained, capsys):
    assert call("finetune.mode=knn", "finetune.holdout=0.3", "optim.clip_grad=2.0", ckpt=pretrained) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: knn")]
    for setting in ("finetune.holdout=0.3", "optim.clip_grad=2.0", "train.steps=6"):
        assert setting in note
    for key in ("finetune.mode", "finetune.neighbors", "data.path", "model.embed_dim"):
        assert key not in note


def test_the_default_shots_are_those_that_there_are_labels_for(call, pretrained, tmp_path, capsys):
    for _ in range(2):
        assert call("finetune.mode=few_shot", "data.labels_per_class=20", ckpt=pretrained) == 0
        out = capsys.readouterr().out
        assert (
            'class "0" has 20 labeled images: finetune.shots=[1, 5, 10], not the default [1, 5, 10, 25]'
            in out
        )
    assert "is finished" in out
    assert list(json.loads((tmp_path / "run" / "summary.json").read_text())["few_shot"]) == ["1", "5", "10"]


def test_new_data_are_another_run(call, digits, pretrained, tmp_path, capsys):
    copy = shutil.copytree(digits, tmp_path / "data")
    arguments = ["finetune.mode=knn", f"data.path={copy}"]
    assert call(*arguments, ckpt=pretrained) == 0
    assert call(*arguments, ckpt=pretrained) == 0
    assert "is finished" in capsys.readouterr().out
    described = json.loads((copy / "dataset.json").read_text())
    described["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (copy / "dataset.json").write_text(json.dumps(described))
    assert call(*arguments, ckpt=pretrained) == 2
    assert "belongs to another run: data.fingerprint was" in capsys.readouterr().err


def test_another_setting_is_named(call, pretrained, capsys):
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    capsys.readouterr()
    assert call("finetune.mode=knn", "finetune.neighbors=7", ckpt=pretrained) == 2
    assert "belongs to another run: finetune.neighbors was 20, now 7. Take those back" in one_line(capsys)


def test_moved_data_and_weights_and_another_monitor_are_the_same_run(
    call, digits, pretrained, tmp_path, capsys
):
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    data, start = tmp_path / "elsewhere", tmp_path / "start"
    shutil.copytree(digits, data)
    shutil.copytree(pretrained, start)
    changes = [f"data.path={data}", "monitor.log_every_steps=7", "train.batch_size_per_device=32"]
    capsys.readouterr()
    assert call("finetune.mode=knn", *changes, ckpt=start) == 0
    assert "is finished" in capsys.readouterr().out
    tensors = load_file(start / "encoder.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({name: value + 1 for name, value in tensors.items()}, other, read_header(start))
    assert call("finetune.mode=knn", ckpt=other) == 2
    assert "belongs to another run: finetune.start_digest was" in one_line(capsys)


@pytest.mark.parametrize("mode", ["knn", "few_shot", "linear_probe"])
def test_the_config_that_a_run_leaves_is_that_run(call, digits, pretrained, tmp_path, capsys, mode):
    run = tmp_path / "run"
    if mode == "linear_probe":
        short = ["train.epochs=1", "train.warmup_epochs=0.5", "train.effective_batch_size=64"]
        place = [f"data.path={digits}", f"run.dir={run}", "model.img_size=8"]
        config = str(ROOT / "configs" / "finetune" / "linear_probe_cifar_tiny.yaml")
        assert main(["--config", config, "--ckpt", str(pretrained), *short, *place]) == 0
    else:
        assert call(f"finetune.mode={mode}", ckpt=pretrained) == 0
    capsys.readouterr()
    assert main(["--config", str(run / "config.yaml")]) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_pretraining_run_in_the_folder_is_refused(call, pretrained, tmp_path, capsys):
    shutil.copytree(pretrained, tmp_path / "run")
    capsys.readouterr()
    assert call("finetune.mode=knn", ckpt=pretrained) == 2
    assert "holds a run of another command" in one_line(capsys)


def read_header(run):
    """The metadata of a run's encoder."""
    with safe_open(run / "encoder.safetensors", "pt") as file:
        return file.metadata()


def test_a_checkpoint_to_go_on_from_is_refused(call, pretrained, tmp_path, capsys):
    assert call("finetune.mode=knn", "--resume", str(tmp_path), ckpt=pretrained) == 2
    assert "--resume PATH has no effect" in capsys.readouterr().err


def test_a_failure_is_named_by_the_folder_and_the_next_run_is_whole(call, pretrained, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr("mae_vit.finetuning.frozen.closed_form.knn_scores", fail)
        with pytest.raises(RuntimeError, match="no"):
            call("finetune.mode=knn", ckpt=pretrained)
    summary = tmp_path / "run" / "summary.json"
    assert json.loads(summary.read_text())["status"] == "failed"
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    assert json.loads(summary.read_text())["status"] == "done"


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_signal_ends_the_first(digits, pretrained, tmp_path):
    config = [
        "--config",
        str(ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml"),
        "--ckpt",
        str(pretrained),
    ]
    options = [
        *SMALL,
        "model.img_size=8",
        f"data.path={digits}",
        f"run.dir={tmp_path / 'run'}",
        "finetune.mode=knn",
    ]
    waits = (
        "import sys, time; import mae_vit.finetuning.frozen.closed_form as scoring;"
        "from mae_vit.finetuning.command import main;"
        "scoring.read_features = lambda *a: (print('reading', flush=True), time.sleep(600));"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", waits, *config, *options]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while "reading" not in (line := first.stdout.readline()):
            assert line, first.stderr.read()
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert second.returncode == 2
        assert "is in use by process" in second.stderr
        os.kill(first.pid, signal.SIGUSR1)
        assert first.wait(100) == 75
    finally:
        first.kill()
        first.communicate()
    assert np.all([not (tmp_path / "run" / name).exists() for name in ("results.json", "predictions.csv")])


def test_a_norm_that_does_not_fit_is_one_line(call, pretrained, tmp_path, capsys):
    assert call("finetune.pool=mean", ckpt=pretrained, name="tuned") == 0
    tensors = load_file(tmp_path / "tuned" / "model.safetensors")
    # Official files tell no geometry.
    torch.save({"model": tensors}, tmp_path / "whole.pth")
    del tensors["fc_norm.bias"]
    torch.save({"model": tensors}, tmp_path / "half.pth")
    knn = [
        "finetune.mode=knn",
        "finetune.pool=mean",
        "model.patch_size=2",
        "model.in_chans=1",
        "model.depth=2",
    ]
    capsys.readouterr()
    for file, width, said in (
        ("whole", 32, "does not fit the model"),
        ("half", 16, "it has no fc_norm.bias"),
    ):
        sizes = [f"model.embed_dim={width}", "model.num_heads=2"]
        assert call(*knn, *sizes, ckpt=tmp_path / f"{file}.pth", name=file) == 2
        assert said in one_line(capsys)


def test_a_run_that_ends_while_it_is_waited_for_is_finished(call, pretrained, tmp_path, monkeypatch, capsys):
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    done = (tmp_path / "run" / "summary.json").read_bytes()
    (tmp_path / "run" / "summary.json").write_bytes(done.replace(b'"done"', b'"running"'))
    before = frozen.resume_or_start

    def end_meanwhile(*arguments, **options):
        (tmp_path / "run" / "summary.json").write_bytes(done)
        return before(*arguments, **options)

    monkeypatch.setattr(frozen, "resume_or_start", end_meanwhile)
    capsys.readouterr()
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    assert "is finished" in capsys.readouterr().out
