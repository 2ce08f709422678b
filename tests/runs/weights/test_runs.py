"""Weights of runs: what a run began from, its labels and its cost; parts of a run are named for what they are."""

import json
import re
import shutil

import pytest
import torch
from helpers.comparison import plan_of
from helpers.embedding import write_folder

from mae_vit.cli.main import main
from mae_vit.comparison.main import check
from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import cost_of_weights
from mae_vit.pretraining.command import main as pretrain
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, step_of
from mae_vit.weights.read import read_weights


@pytest.fixture(scope="module")
def call(digits):
    def call(folder, *options) -> int:
        small = ["model.embed_dim=16", "model.depth=1", "model.num_heads=2", "monitor.tensorboard=false"]
        words = [f"data.path={digits}", f"run.dir={folder}", "train.engine=torch", "train.warmup_steps=0"]
        return pretrain(["--config", "mae_digits", *small, *words, "train.steps=2", *options])

    return call


@pytest.fixture(scope="module")
def trained(call, tmp_path_factory):
    """A run that keeps its first checkpoint and its last."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert call(run, "checkpoint.every_steps=1000") == 0
    return run


@pytest.fixture
def first(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "first")


def test_a_run_begins_from_another(call, first, tmp_path, capsys):
    begun = [f"model.init={first}"]
    assert call(tmp_path / "second", *begun, "optim.lr=1e-12") == 0
    assert "100.0%" in capsys.readouterr().out
    weights, second = (read_weights(str(tmp_path / name)) for name in ("first", "second"))
    for name, value in weights.tensors.items():
        torch.testing.assert_close(second.tensors[name], value, atol=1e-6, rtol=0)
    own, whole = (cost_of_weights(str(tmp_path / name)) for name in ("first", "second"))
    assert own.images_seen
    assert own.flops
    assert whole == own + own
    assert call(tmp_path / "third", *begun, "model.num_heads=4") == 2
    assert not (tmp_path / "third").exists()


def test_an_unfinished_run_and_a_damaged_checkpoint_are_said(call, first, tmp_path, capsys):
    newest = list_checkpoints(first / "checkpoints")[-1]
    later = newest.with_name("step-00000099")
    shutil.copytree(newest, later)
    assert not read_weights(str(first)).remarks
    summary = first / "summary.json"
    summary.write_text(json.dumps({"status": "interrupted", "total_steps": 1815}))
    assert "99 of 1,815" in read_weights(str(first)).remarks["unfinished"]
    capsys.readouterr()
    assert call(tmp_path / "third", f"model.init={first}", "--dry-run") == 0
    assert re.search(r"\n  unfinished .*99 of 1,815\n", capsys.readouterr().out)
    write_folder(tmp_path / "photos")
    for words in (["export", "--to", "timm"], ["embed", str(tmp_path / "photos")]):
        assert main([words[0], str(first), *words[1:], "--out", str(tmp_path / words[0])]) == 0
        assert capsys.readouterr().err.count("99 of 1,815") == 1
    words = ["inspect", str(first), "--data", str(tmp_path / "photos"), "--images", "4"]
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    plan = plan_of(tmp_path, [{"name": "x", "config": "finetune_cifar_tiny", "start": str(first)}])
    with pytest.raises(InputError, match=r"99 of 1,815; finish"):
        check(plan)
    assert "99 of 1,815" in (tmp_path / "page" / "index.html").read_text()
    summary.write_text('{"status": "interr')
    assert not read_weights(str(first)).remarks
    damage = later / "parameters.safetensors"
    damage.write_bytes(damage.read_bytes()[:-1] + b"!")
    again = read_weights(str(first))
    assert again.source == str(newest)
    assert "step-00000099" in again.remarks["passed over"]
    for checkpoint in list_checkpoints(first / "checkpoints"):
        (checkpoint / "parameters.safetensors").unlink()
    with pytest.raises(InputError, match=r"are broken: .*; give .*/encoder\.safetensors$"):
        read_weights(str(first))


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("harm", "asked"),
    [
        *((shutil.rmtree, ""), (lambda last: cut(last / "parameters.safetensors"), "")),
        *((lambda last: None, "checkpoints"), (lambda last: None, "checkpoints/{last}/exp_avg.safetensors")),
    ],
    ids=["half copied", "damaged", "inner folder", "optimizer's state"],
)
def test_parts_of_a_run_are_named_for_what_they_are(first, harm, asked, said):
    begin, last = list_checkpoints(first / "checkpoints")
    assert step_of(begin) == 0
    harm(last)
    with pytest.raises(InputError) as error:
        read_weights(str(first / asked.format(last=last.name)))
    said(error)


def test_labels_and_cost_are_known_through_what_a_run_began_from(call, trained, tmp_path):
    """Else weights that have them by way of another run would be compared as if they had none."""
    labels = ["objective={name: supervised}", "data.leave_out_per_class=20"]
    assert call(tmp_path / "first", *labels) == 0
    known = read_weights(str(tmp_path / "first")).labels
    assert known.left_out == 20
    begun = [f"model.init={tmp_path / 'first'}"]
    assert call(tmp_path / "second", *begun) == 0
    # It resumes without them.
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    assert call(tmp_path / "second", *begun, "train.steps=4", "--extend") == 0
    for path, expected in (("second", known), ("second/encoder.safetensors", known), (trained, None)):
        assert read_weights(str(tmp_path / path)).labels == expected
    before, own = cost_of_weights(str(tmp_path / "elsewhere")), cost_of_weights(str(trained))
    whole = cost_of_weights(str(tmp_path / "second"))
    assert before.images_seen == own.images_seen == 256
    assert whole.images_seen == before.images_seen + 2 * own.images_seen
    assert whole.flops == before.flops + 2 * own.flops
