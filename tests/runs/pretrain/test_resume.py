"""What goes on where it stopped, bit for bit, and what is refused as another run."""

import errno
import json
import math
import os
import shutil
import signal

import pytest
from helpers.commands import lines_of, one_line, summary_of
from helpers.leaked_tensors import Leftovers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mae_vit.training.checkpoints import saver
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint


def test_stopping_half_way_changes_nothing(call, tmp_path):
    assert call(name="straight") == 0
    assert call("train.steps=6", name="cut") == 0
    cut = tmp_path / "cut"
    # As after a power cut between step 4's save and the end.
    (cut / "encoder.safetensors").unlink()
    for path in list_checkpoints(cut / "checkpoints")[-1].iterdir():
        path.unlink()
    list_checkpoints(cut / "checkpoints")[-1].rmdir()
    summary = summary_of(cut) | {"status": "running"}
    (cut / "summary.json").write_text(json.dumps(summary))
    assert call(name="cut") == 0
    straight = tmp_path / "straight"
    assert (cut / "encoder.safetensors").read_bytes() == (straight / "encoder.safetensors").read_bytes()
    kept = ("step", "loss", "lr", "grad_norm", "heldout")
    assert [[line.get(k) for k in kept] for line in lines_of(cut)] == [
        [line.get(k) for k in kept] for line in lines_of(straight)
    ]


def test_nothing_of_a_checkpoint_stays_in_memory(call, tmp_path, monkeypatch):
    options = ("checkpoint.keep_last=9",)
    assert call(*options, "train.ema_decay=0.9", name="whole") == 0
    middle = tmp_path / "whole" / "checkpoints" / "step-00000004"
    left = Leftovers(monkeypatch)
    assert call(*options, "train.ema_decay=0.9", "--resume", str(middle), name="rest") == 0
    assert len(left.read) > 40
    assert left.alive == [0]


@pytest.mark.slow
def test_noise_inside_layers_is_resumed_exactly_too(call, tmp_path):
    options = ["model.depth=2", "model.drop_rate=0.1", "model.drop_path_rate=0.3", "checkpoint.keep_last=9"]
    assert call(*options, name="whole") == 0
    middle = tmp_path / "whole" / "checkpoints" / "step-00000004"
    assert call(*options, "--resume", str(middle), name="rest") == 0
    assert call(*options, "model.drop_path_rate=0.0", name="other") == 0
    whole, rest, other = (
        (tmp_path / name / "encoder.safetensors").read_bytes() for name in ("whole", "rest", "other")
    )
    assert whole == rest
    assert whole != other


def test_a_finished_run_says_so(call, tmp_path, capsys):
    assert call() == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert call() == 0
    assert "is finished (6 steps)" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


ANOTHER = [
    "run.seed=1",
    "objective.mask_ratio=0.5",
    "model.depth=2",
    "train.effective_batch_size=64",
    "train.steps=8",
    "optim.lr=1e-4",
    "data.augment.flip=true",
    "data.split=test",
    "data.order=blocks",
]


def test_another_run_is_refused_by_name(call, tmp_path, capsys):
    assert call() == 0
    files = [path for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for change in ANOTHER:
        capsys.readouterr()
        assert call(change) == 2, change
        assert f"{change.partition('=')[0]} was " in one_line(capsys), change
        after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()}
        assert after == before, change


def test_an_older_checkpoint_may_lack_options_at_their_defaults(call, tmp_path, capsys):
    """Else every new option would orphan every earlier run."""
    assert call("train.steps=6", "checkpoint.keep_last=9") == 0
    state = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[0] / "state.json"

    def forget(key: str) -> None:
        described = json.loads(state.read_text())
        del described["identity"][key]
        state.write_text(json.dumps(described))

    forget("model.mlp_ratio")
    forget("data.mean")
    resume = ["--resume", str(state.parent)]
    assert call(*resume, name="second") == 0
    forget("optim.lr")
    assert call(*resume, name="third") == 2
    assert "optim.lr was unset" in capsys.readouterr().err


def test_another_normalization_is_another_run(call, tmp_path, capsys):
    assert call("data.normalize=half") == 0
    assert call("data.normalize=half", "train.steps=8") == 2
    capsys.readouterr()
    state = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[0] / "state.json"
    described = json.loads(state.read_text())
    described["identity"]["data.mean"] = [0.4]
    state.write_text(json.dumps(described))
    assert call("data.normalize=half", "--resume", str(state.parent), name="second") == 2
    assert "data.mean was [0.4]" in capsys.readouterr().err


def test_another_order_is_refused_by_name(call, many_shards, capsys):
    base = [f"data.path={many_shards}", "data.source=tar", "data.workers=0", "data.order=blocks"]
    assert call(*base, "train.steps=2") == 0
    for change in ("data.lanes=4", "data.block_shards=3", "data.order=global"):
        capsys.readouterr()
        assert call(*base, "train.steps=2", change) == 2, change
        assert f"{change.partition('=')[0]} was " in capsys.readouterr().err, change


def test_what_may_change_may_change(call, tmp_path, capsys):
    assert call("checkpoint.keep_last=5") == 0
    folder = tmp_path / "run"
    for path in list_checkpoints(folder / "checkpoints")[2:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    (folder / "summary.json").unlink()
    changes = [
        "data.source=tar",
        "train.batch_size_per_device=64",
        "train.activation_checkpointing=true",
        "monitor.log_every_steps=2",
        "checkpoint.keep_last=1",
    ]
    assert call(*changes) == 0
    assert "resuming from" in capsys.readouterr().err
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3, 4, 6]
    assert len(list_checkpoints(folder / "checkpoints")) == 1


def test_never_begins_again_and_keeps_the_old_run(call, tmp_path):
    assert call() == 0
    assert call("--resume", "never", "run.seed=3") == 0
    assert summary_of(tmp_path / "run.1")["status"] == "done"
    encoders = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("run", "run.1")]
    assert encoders[0] != encoders[1]


def test_resume_from_another_folder(call, tmp_path, capsys):
    assert call(name="first") == 0
    first = list_checkpoints(tmp_path / "first" / "checkpoints")[0]
    assert load_checkpoint(first).step == 4
    capsys.readouterr()
    assert call("--resume", str(first), name="second") == 0
    assert f"{first}, step 4" in capsys.readouterr().err
    encoders = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("first", "second")]
    assert encoders[0] == encoders[1]


@pytest.mark.parametrize("earlier", ["objective.mask_ratio=0.75", "objective.mask_ratio=0.5"])
def test_a_start_that_trained_nothing_does_not_hide_the_checkpoint_that_is_asked_for(
    call, tmp_path, capsys, earlier
):
    assert call("checkpoint.keep_last=9", name="first") == 0
    first = list_checkpoints(tmp_path / "first" / "checkpoints")[-2]
    assert load_checkpoint(first).step == 4
    # As after a kill before the first step, of this config or of another.
    assert call("checkpoint.keep_last=9", earlier, name="second") == 0
    own = list_checkpoints(tmp_path / "second" / "checkpoints")
    for path in own[1:]:
        shutil.rmtree(path)
    summary = summary_of(tmp_path / "second") | {"status": "running"}
    (tmp_path / "second" / "summary.json").write_text(json.dumps(summary))
    assert load_checkpoint(own[0]).step == 0
    capsys.readouterr()
    assert call("checkpoint.keep_last=9", "--resume", str(first), name="second") == 0
    assert f"{first}, step 4" in capsys.readouterr().err
    encoders = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("first", "second")]
    assert encoders[0] == encoders[1]
    # A rollback would have gone back to it.
    assert not own[0].exists()
    # What is asked for is still checked.
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    assert call("objective.mask_ratio=0.5", "--resume", str(first), name="second") == 2
    assert "objective.mask_ratio was 0.75" in one_line(capsys)


def test_a_stop_whose_save_fails_says_where_it_will_resume(call, capsys, monkeypatch):
    whole = saver.save_checkpoint

    def full(folder, *, step, **more):
        if not step:
            return whole(folder, step=step, **more)
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(saver, "save_checkpoint", full)
    assert call("train.steps=20", "checkpoint.every_steps=2") == 75
    said = capsys.readouterr().out
    assert "/20 " in said
    assert "from step 0" in said
    assert "after saving" not in said


def test_weights_that_are_not_finite_are_refused_by_name(call, tmp_path, capsys):
    assert call(name="first") == 0
    file = tmp_path / "first" / "encoder.safetensors"
    tensors = load_file(file)
    tensors["norm.bias"][0] = math.nan
    broken = tmp_path / "broken.safetensors"
    with safe_open(file, "pt") as described:
        save_file(tensors, broken, described.metadata())
    capsys.readouterr()
    assert call(f"model.init={broken}", name="second") == 2
    assert "norm.bias" in one_line(capsys)


def test_a_broken_newest_checkpoint_is_skipped_and_only_broken_ones_are_an_error(call, tmp_path, capsys):
    assert call() == 0
    folder = tmp_path / "run" / "checkpoints"
    (tmp_path / "run" / "summary.json").unlink()
    older, newest = list_checkpoints(folder)
    data = bytearray((newest / "exp_avg.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "exp_avg.safetensors").write_bytes(data)
    capsys.readouterr()
    assert call() == 0
    captured = capsys.readouterr()
    assert "exp_avg.safetensors" in captured.err
    assert f"resuming from {older}" in captured.err
    for path in list_checkpoints(folder):
        (path / "state.json").write_text("{}")
    assert call() == 2
    assert "--resume never" in capsys.readouterr().err


def test_a_run_is_extended_when_asked_to(call, tmp_path, capsys):
    assert call() == 0
    capsys.readouterr()
    assert call("train.steps=10") == 2
    line = one_line(capsys)
    assert "train.steps was 6" in line
    assert "--extend" in line
    assert call("train.steps=10", "--extend") == 0
    folder = tmp_path / "run"
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 11))
    assert summary_of(folder)["steps"] == 10
    # From the seventh step on at the rates of a run of ten.
    assert call("train.steps=10", name="long") == 0
    assert [line["lr"] for line in lines_of(folder)[6:]] == [
        line["lr"] for line in lines_of(tmp_path / "long")[6:]
    ]
    capsys.readouterr()
    assert call("train.steps=8", "--extend") == 2
    assert "step 10, beyond the 8" in one_line(capsys)
    assert call("train.steps=8", "--extend", "--dry-run") == 0
    assert "step 10, beyond the 8" in capsys.readouterr().out
    assert call("train.steps=12", "--extend", "model.depth=2") == 2
    assert "model.depth was 1" in one_line(capsys)
