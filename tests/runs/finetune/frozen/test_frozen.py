"""Runs on frozen features: whose features, which options, whose folder, and how they end."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, SMALL_PRETRAIN, lines_of, one_line, summary_of
from helpers.damage import description
from helpers.finetune import SMALL, TINY
from helpers.images import encoded, picture, write_tar
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import open_index
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.finetuning.command import main
from mae_vit.finetuning.frozen import score
from mae_vit.inspection.images import draw_samples
from mae_vit.pretraining.command import main as pretrain_main
from mae_vit.pretraining.report.run_record import read_run
from mae_vit.training import evals
from mae_vit.training.checkpoints.remote import RemoteRun
from mae_vit.weights.encoder import load_encoder

KNN = "finetune.mode=knn"
PROBE = ["finetune.mode=linear_probe", "finetune.test=false", "train.epochs=1", "train.warmup_epochs=0.5"]
PROBE += ["train.effective_batch_size=64"]


@pytest.fixture
def scored(shared, pretrained, tmp_path):
    """Scores of nearest neighbors in `run`, which another session's run left."""
    folder = shutil.copytree(shared(KNN, ckpt=pretrained).folder, tmp_path / "run")
    return folder / "summary.json"


@pytest.mark.parametrize("mode", ["few_shot", "knn"])
def test_frozen_features_are_scored(shared, pretrained, mode):
    before = {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()}
    folder = shared(f"finetune.mode={mode}", ckpt=pretrained).folder
    summary = summary_of(folder)
    assert (summary["status"], summary["train_size"], summary["val_size"]) == ("done", 1497, 0)
    # Even random features tell digits apart far above the 10 % of chance.
    assert 0.2 < summary["test_top1"] <= 1
    if mode == "few_shot":
        assert list(summary["few_shot"]) == ["1", "5", "10", "25"]
        means = [scores["mean"] for scores in summary["few_shot"].values()]
        assert means[0] < means[-1]
        for scores in summary["few_shot"].values():
            assert scores["mean"] == pytest.approx(np.mean(scores["draws"]))
            assert scores["std"] == pytest.approx(np.std(scores["draws"], ddof=1))
            assert len(set(scores["draws"])) > 1
        whole = shared(
            f"finetune.mode={mode}", "data.labels_per_class=2", "finetune.shots=[2]", ckpt=pretrained
        )
        (scores,) = summary_of(whole.folder)["few_shot"].values()
        assert len(scores["draws"]) == 1  # there is no other draw
        assert scores["std"] is None
    assert {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("mode", ["knn", "few_shot", "linear_probe"])
def test_random_weights_are_measured_beside_the_pretrained_ones(shared, pretrained, mode):
    """What they reach is what a run without --ckpt reaches; the config that a run leaves is that run."""
    words, options = [f"finetune.mode={mode}", "finetune.pool=mean"], {}
    if mode == "linear_probe":
        words, options = PROBE, {"config": "linear_probe_cifar_tiny", "small": ()}
    top1 = "val_top1" if mode == "linear_probe" else "test_top1"
    folder, out, _ = shared(*words, ckpt=pretrained, **options)
    summary = summary_of(folder)
    low, high = summary["interval_95"]
    assert 0 <= low < summary[top1] < high <= 1
    assert f"  95 %      {low:.1%} to {high:.1%}" in out
    assert f"{summary['random_weights_top1']:.2%}: " in out
    alone = summary_of(shared(*words, **options).folder)
    assert summary["random_weights_top1"] == alone[top1]
    assert "random_weights_top1" not in alone
    assert main(["--config", str(folder / "config.yaml")]) == 0


def test_frozen_options_have_effects(call, shared, pretrained, tmp_path):
    base = ["finetune.mode=few_shot", "finetune.shots=[5]", "finetune.draws=2"]
    changes = {
        "shots": [*base, "finetune.shots=[6]", "finetune.draws=3"],
        "pool": [*base, "finetune.pool=cls", "data.labels_per_class=30"],
        "neighbors": [KNN, "finetune.neighbors=3"],
    }
    folders = [shared(KNN, ckpt=pretrained).folder]
    for name, change in {"base": base, **changes}.items():
        assert call(*change, name=name, ckpt=pretrained) == 0
        folders.append(tmp_path / name)
    seen = {
        json.dumps(summary_of(folder).get("few_shot")) + (folder / "predictions.csv").read_text()
        for folder in folders
    }
    assert len(seen) == len(folders)


def test_the_test_split_is_read_once(call, digits, pretrained, spy):
    seen: list[int] = []

    def rendered(source, seed, epoch, places, *_, **options):
        seen.extend(source.numbers(places) if source.source.index.split == "test" else ())

    spy(AugmentedSource, "render", rendered)
    assert call("finetune.mode=few_shot", ckpt=pretrained) == 0
    # By the encoder, and by the same network with random weights.
    assert sorted(seen) == sorted(2 * list(range(len(open_index(digits, "test")))))


def test_more_neighbors_than_images_are_all_images(call, pretrained, tmp_path):
    assert call(KNN, "finetune.neighbors=1000", "data.labels_per_class=5", ckpt=pretrained) == 0
    assert summary_of(tmp_path / "run")["neighbors"] == 50
    # It left no metrics, and its page misses none.
    assert read_run(tmp_path / "run").problems == ()


def test_images_that_are_seen_as_they_are_need_not_fit_the_crops_of_training(call, pretrained):
    assert call(KNN, "data.augment.crop=pad", "model.img_size=16", "--dry-run", ckpt=pretrained) == 0


def test_options_that_do_nothing_are_named(call, pretrained, capsys):
    assert call(KNN, "finetune.holdout=0.3", "optim.clip_grad=2.0", ckpt=pretrained) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: knn")]
    named = {option.partition("=")[0] for option in note.partition(": ")[2].partition(": ")[2].split(", ")}
    assert {"finetune.holdout", "optim.clip_grad", "train.steps"} <= named
    assert not {"finetune.mode", "finetune.neighbors", "data.path", "model.embed_dim"} & named


def test_the_default_shots_are_those_that_there_are_labels_for(call, pretrained, tmp_path, capsys):
    for _ in range(2):
        assert call("finetune.mode=few_shot", "data.labels_per_class=20", ckpt=pretrained) == 0
        out = capsys.readouterr().out
        assert "using finetune.shots=[1, 5, 10] " in out
    assert "is finished" in out
    assert list(summary_of(tmp_path / "run")["few_shot"]) == ["1", "5", "10"]


def test_all_labels_of_a_subset_are_shots_where_a_class_has_fewer(call, digits, pretrained, tmp_path, capsys):
    counts = np.bincount(open_index(digits, "train").labels)
    few = ["finetune.mode=few_shot", f"data.labels_per_class={counts.max()}", "finetune.draws=1"]
    assert call(*few, f"finetune.shots=[{counts.max()}]", ckpt=pretrained) == 0
    assert "have fewer (fewest" in capsys.readouterr().out
    summary = summary_of(tmp_path / "run")
    assert summary["train_size"] == counts.sum() < 10 * counts.max()
    assert call(*few, f"finetune.shots=[5,{counts.max()}]", name="other", ckpt=pretrained) == 2


def test_names_that_are_no_utf_8_lose_no_result(call, tmp_path):
    """Shards that are taken as they lie name their samples as they like."""
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")
    files = {
        f"{odd}{n}.{kind}": data
        for n in range(8)
        for kind, data in (("cls", b"%d" % (n % 2)), ("png", encoded(picture(n, (8, 8)), "png")))
    }
    for split in ("train", "val"):
        write_tar(tmp_path / "data" / f"{split}-000000.tar", files)
    index_in_place(tmp_path / "data")
    place = [f"data.path={tmp_path / 'data'}", "model.in_chans=3"]
    assert call(KNN, "data.labels_per_class=3", *place) == 0
    assert len(summary_of(tmp_path / "run")["train_images"]) == 16
    lines = (tmp_path / "run" / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == [rf"caf\udce9{n}" for n in range(8)]


def test_what_a_run_read_is_its_identity(call, digits, pretrained, scored, tmp_path, capsys, said):
    """Data and weights may move, and what changes no score may change."""
    data = shutil.copytree(digits, tmp_path / "data")
    weights = shutil.copytree(pretrained, tmp_path / "weights")
    free = [f"data.path={data}", "monitor.log_every_steps=7", "train.batch_size_per_device=32"]
    free += ["finetune.holdout=0.3", "optim.lr=3.0", "data.augment.erasing=0.5"]  # without effect
    assert call(KNN, *free, ckpt=weights) == 0
    assert "is finished" in capsys.readouterr().out
    tensors = load_file(weights / "encoder.safetensors")
    with safe_open(weights / "encoder.safetensors", "pt") as file:
        header = file.metadata()
    other = tmp_path / "other.safetensors"
    save_file({name: value + 1 for name, value in tensors.items()}, other, header)
    with description(data) as described:
        described["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    for words, ckpt in (
        *((["finetune.neighbors=7"], pretrained), ([f"data.path={data}"], pretrained)),
        ([], other),
    ):
        assert call(KNN, *words, ckpt=ckpt) == 2
        said(re.sub("[0-9a-f]{12,}", "DIGEST", one_line(capsys)))


def test_a_plan_reads_the_run_behind_its_url(call, pretrained, scored, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{scored.parent}"
    assert call(KNN, f"run.dir={url}", "--dry-run", ckpt=pretrained) == 0
    assert f": {url}/results.json" in capsys.readouterr().out
    assert call("finetune.mode=few_shot", f"run.dir={url}", "--dry-run", ckpt=pretrained) == 0
    out = capsys.readouterr().out
    assert "finetune.mode was 'knn', now 'few_shot'" in out
    assert "another run.dir" in out
    assert "aside" not in out
    assert not [*tmp_path.glob("cache/**/config.yaml")]
    # The run itself says so too.
    assert call("finetune.mode=few_shot", f"run.dir={url}", ckpt=pretrained) == 2
    line = one_line(capsys)
    assert line.startswith(f"error: {url} ")
    assert line.endswith("another run.dir")


def test_a_store_that_refuses_the_scores_is_named_alone(call, pretrained, tmp_path, monkeypatch, capsys):
    def refuse(self, path, name):
        raise PermissionError("no right")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(RemoteRun, "_put", refuse)
    url = f"file://{tmp_path}/store"
    assert call(KNN, f"run.dir={url}", ckpt=pretrained) == 2
    assert f"error: {url} cannot be written: no right" in capsys.readouterr().err


def test_a_failure_is_named_by_the_folder_and_the_next_run_is_whole(call, pretrained, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr("mae_vit.finetuning.frozen.closed_form.knn_scores", fail)
        with pytest.raises(RuntimeError, match="no"):
            call(KNN, ckpt=pretrained)
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert call(KNN, ckpt=pretrained) == 0
    assert summary_of(tmp_path / "run")["status"] == "done"


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_signal_ends_the_first(digits, pretrained, tmp_path):
    waits = (
        "import sys, time; import mae_vit.finetuning.frozen.closed_form as scoring;"
        "from mae_vit.finetuning.command import main;"
        "scoring.Frozen.features = lambda *a: (print('reading', flush=True), time.sleep(600));"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["--config", "finetune_cifar_tiny", "--ckpt", str(pretrained), *SMALL, "model.img_size=8", KNN]
    place = [f"data.path={digits}", f"run.dir={tmp_path / 'run'}"]
    command = [sys.executable, "-c", waits, *words, *place]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while "reading" not in (line := first.stdout.readline()):
            assert line, first.stderr.read()
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert second.returncode == 2
        assert "in use by" in second.stderr
        os.kill(first.pid, signal.SIGUSR1)
        assert first.wait(100) == 75
    finally:
        first.kill()
        first.communicate()
    assert not any((tmp_path / "run" / name).exists() for name in ("results.json", "predictions.csv"))


def test_a_norm_that_does_not_fit_is_one_line(call, shared, pretrained, tmp_path, capsys, said):
    tensors = load_file(shared(ckpt=pretrained).folder / "model.safetensors")
    # Official files tell no geometry.
    torch.save({"model": tensors}, tmp_path / "whole.pth")
    del tensors["fc_norm.bias"]
    torch.save({"model": tensors}, tmp_path / "half.pth")
    sizes = [option for option in TINY if "img_size" not in option and "embed_dim" not in option]
    for file, width in (("whole", 32), ("half", 16)):
        words = [KNN, "finetune.pool=mean", *sizes, f"model.embed_dim={width}"]
        (tmp_path / file).mkdir()
        assert call(*words, "--resume", "never", ckpt=tmp_path / f"{file}.pth", name=file) == 2
        assert not (tmp_path / f"{file}.1").exists()
        said(one_line(capsys))


def test_a_run_that_ends_while_it_is_waited_for_is_finished(call, pretrained, scored, monkeypatch, capsys):
    done = scored.read_bytes()
    scored.write_bytes(done.replace(b'"done"', b'"running"'))
    before = score.resume_or_start

    def end_meanwhile(*arguments, **options):
        scored.write_bytes(done)
        return before(*arguments, **options)

    monkeypatch.setattr(score, "resume_or_start", end_meanwhile)
    assert call(KNN, ckpt=pretrained) == 0
    assert "is finished" in capsys.readouterr().out


def measured_alone(path, data, split: str, pool: str) -> tuple[float, float]:
    """Both measures of all images of a split."""
    encoder = load_encoder(path, pool=pool)
    samples = draw_samples(str(data), count=10_000, encoder=encoder.info, split=split)
    with torch.no_grad():
        features = encoder(encoder.normalize(samples.images))
    return tuple(feature_metrics(feature_sums(features), features.shape[1]).values())


def pretrain(data, folder) -> dict[str, float]:
    options = [f"run.dir={folder}", "train.precision=fp32", "monitor.evaluate_images=10000"]
    words = ["--config", "mae_digits", *SMALL_PRETRAIN, *TINY, f"data.path={data}", *options]
    assert pretrain_main([*words, "monitor.probe_queries=0"]) == 0
    return lines_of(folder)[-1]["heldout"]


def test_every_evaluation_measures_the_mean_of_the_patches(digits, tmp_path):
    measured = pretrain(digits, tmp_path / "run")
    expected = measured_alone(tmp_path / "run" / "encoder.safetensors", digits, "test", "mean")
    assert (measured["rankme"], measured["feature_std"]) == pytest.approx(expected, rel=1e-3)
    evaluated = [line for line in lines_of(tmp_path / "run") if "heldout" in line]
    assert len(evaluated) == 2
    assert all(math.isfinite(line["heldout"]["rankme"]) for line in evaluated)


def test_the_number_of_measured_images_is_bounded(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(evals, "MOST_RANKED", 1)
    assert pretrain(digits, tmp_path / "run")["rankme"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", ["knn", "linear_probe"])
def test_frozen_modes_measure_the_training_images(shared, pretrained, digits, mode):
    words = [f"finetune.mode={mode}", "finetune.pool=cls", "train.precision=fp32"]
    options = {}
    if mode == "linear_probe":
        words += ["train.epochs=1", "train.warmup_epochs=null", "train.effective_batch_size=64"]
        words += ["finetune.holdout=0", "finetune.lr_factors=[1.0]"]
        options = {"config": "linear_probe_cifar_tiny", "small": ()}
    folder, out, _ = shared(*words, ckpt=pretrained, **options)
    expected, summary = (
        measured_alone(pretrained / "encoder.safetensors", digits, "train", "cls"),
        summary_of(folder),
    )
    assert (summary["rankme"], summary["feature_std"]) == pytest.approx(expected, rel=1e-3)
    assert f"rank {expected[0]:.1f} of 16" in out
