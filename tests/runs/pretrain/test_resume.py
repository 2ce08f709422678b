"""What goes on where it stopped, bit for bit, and what is refused as another run."""

import errno
import json
import math
import os
import shutil
import signal

import pytest
from helpers.commands import cut_back, lines_of, one_line, saved_steps, summary_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mae_vit.training.checkpoints import saver
from mae_vit.training.checkpoints.checkpoint import list_checkpoints

KEEP = "checkpoint.keep_last=9"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopping_half_way_changes_nothing(call, tmp_path, encoder, optimizer):
    name = f"optim.name={optimizer}"
    assert call(name, name="straight") == 0
    assert call(name, "train.steps=6", name="cut") == 0
    cut_back(tmp_path / "cut", 4)
    assert call(name, name="cut") == 0
    assert encoder("cut") == encoder("straight")
    kept = ("step", "loss", "lr", "grad_norm", "heldout")
    cut, straight = (
        [[line.get(k) for k in kept] for line in lines_of(tmp_path / name)] for name in ("cut", "straight")
    )
    assert cut == straight


def test_an_attempt_that_saved_no_step_leaves_nothing_behind(call, tmp_path, encoder):
    assert call(KEEP, name="other") == 0
    assert call(KEEP, name="straight") == 0
    for torn in (False, True):
        # It saved step 0 alone, or what it saved later is torn.
        assert call(KEEP, "run.seed=1") == 0
        cut_back(tmp_path / "run", 6 if torn else 0)
        for path in list_checkpoints(tmp_path / "run" / "checkpoints")[1:]:
            os.truncate(next(path.glob("*.safetensors")), 100)
        start = [] if torn else ["--resume", str(tmp_path / "other" / "checkpoints" / "step-00000004")]
        assert call(KEEP, *start) == 0
        assert [line["step"] for line in lines_of(tmp_path / "run")] == (
            [1, 2, 3, 4, 5, 6] if torn else [5, 6]
        )
        assert encoder() == encoder("straight")
        shutil.rmtree(tmp_path / "run")


ANOTHER = [
    *("run.seed=1", "objective.mask_ratio=0.5", "model.depth=2", "train.effective_batch_size=64"),
    *("train.steps=8", "optim.lr=1e-4", "data.augment.flip=true", "data.split=test", "data.order=blocks"),
]


def test_a_finished_run_says_so_and_another_is_refused_by_name(call, tmp_path, capsys):
    assert call() == 0
    files = [path for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    capsys.readouterr()
    assert call() == 0
    assert "is finished (6 steps)" in capsys.readouterr().out
    for change in ANOTHER:
        assert call(change) == 2, change
        assert f"{change.partition('=')[0]} was " in one_line(capsys), change
        after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()}
        assert after == before, change


def test_another_order_is_refused_by_name(call, many_shards, capsys):
    base = [f"data.path={many_shards}", "data.source=tar", "data.workers=0", "data.order=blocks"]
    assert call(*base, "train.steps=2") == 0
    for change in ("data.lanes=4", "data.block_shards=3", "data.order=global"):
        assert call(*base, "train.steps=2", change) == 2, change
        assert f"{change.partition('=')[0]} was " in capsys.readouterr().err, change


def test_an_older_checkpoint_may_lack_options(call, checkpoint, capsys):
    """Else every new option would orphan every earlier run."""
    assert call(KEEP) == 0
    state = checkpoint("run", 0) / "state.json"

    def change(key: str, value=None) -> None:
        described = json.loads(state.read_text())
        described["identity"] = {k: v for k, v in described["identity"].items() if k != key}
        described["identity"] |= {} if value is None else {key: value}
        state.write_text(json.dumps(described))

    resume = ["--resume", str(state.parent)]
    change("model.mlp_ratio")
    change("data.mean")
    assert call(*resume, name="second") == 0
    # Another normalization is another run.
    change("data.mean", [0.4])
    assert call(*resume, name="third") == 2
    assert "data.mean was [0.4]" in capsys.readouterr().err


def test_what_may_change_may_change(call, tmp_path, capsys):
    assert call("checkpoint.keep_last=5") == 0
    cut_back(tmp_path / "run", 2)
    changes = [
        *("data.source=tar", "train.batch_size_per_device=64", "train.activation_checkpointing=true"),
        *("monitor.log_every_steps=2", "checkpoint.keep_last=1"),
    ]
    assert call(*changes) == 0
    assert "resuming from" in capsys.readouterr().err
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3, 4, 6]
    assert len(saved_steps(tmp_path / "run")) == 1


def test_never_begins_again_and_keeps_the_old_run(call, tmp_path, encoder, capsys, monkeypatch):
    assert call() == 0
    # What is refused moves nothing.
    for words in (["model.init=nowhere.safetensors"], ["model.family=vit_rope", "train.attention=flash"]):
        assert call("--resume", "never", *words) == 2
        assert not (tmp_path / "run.1").exists()
    assert call("--dry-run", *words) == 2
    assert "error: train.attention=flash" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert call("--resume", "never", "run.seed=3") == 2
    call("--resume", "never", "run.seed=3", "--dry-run")
    assert "never would start over" in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to("elsewhere")
    with monkeypatch.context() as within:
        within.chdir(tmp_path / "run")
        assert call("--resume", "never", "run.seed=3") == 2
    assert call("--resume", "never", "run.seed=3") == 0
    assert summary_of(tmp_path / "elsewhere.1")["status"] == "done"
    assert (tmp_path / "run").is_symlink()
    assert encoder("run") != encoder("elsewhere.1")


@pytest.mark.parametrize("theirs", ["config.yaml", "pictures/1.jpg"])
def test_a_run_replaces_no_files_of_others(call, tmp_path, capsys, theirs):
    file = tmp_path / "run" / theirs
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for words in ([], ["--resume", "never"], ["--dry-run"]):
        assert call(*words) == 2
        assert f"a run would replace its {theirs.partition('/')[0]}" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize("earlier", [None, "objective.mask_ratio=0.75", "objective.mask_ratio=0.5"])
def test_resume_from_another_folder(call, tmp_path, capsys, checkpoint, encoder, earlier):
    """A start that trained nothing, of this config or of another, does not hide the checkpoint that is asked for."""
    assert call(KEEP, name="first") == 0
    first = checkpoint("first", 4)
    if earlier:
        assert call(KEEP, earlier, name="second") == 0
        cut_back(tmp_path / "second", 0)
    capsys.readouterr()
    assert call(KEEP, "--resume", str(first), name="second") == 0
    assert f"{first}, step 4" in capsys.readouterr().err
    assert call(KEEP, "--resume", str(first), name="second") == 0
    assert f"--resume {first} is not used" in capsys.readouterr().out
    assert call(KEEP, "--resume", str(tmp_path / "second"), name="second") == 0
    assert "is not used" not in capsys.readouterr().out
    assert encoder("first") == encoder("second")
    # A rollback would have gone back to it.
    assert 0 not in saved_steps(tmp_path / "second")
    # What is asked for is still checked.
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    assert call("objective.mask_ratio=0.5", "--resume", str(first), name="second") == 2
    assert "objective.mask_ratio was 0.75" in one_line(capsys)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_stop_whose_save_fails_says_where_it_will_resume(call, capsys, monkeypatch, resume):
    whole = saver.save_checkpoint

    def full(folder, *, step, **more):
        if not step:
            return whole(folder, step=step, **more)
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(saver, "save_checkpoint", full)
    assert call("train.steps=20", "checkpoint.every_steps=2", "--resume", resume) == 75
    said = capsys.readouterr().out
    assert "/20 " in said
    without = " without --resume never" if resume == "never" else ""
    assert f"; the same command{without} resumes from step 0" in said
    assert "after saving" not in said


def test_weights_that_are_not_finite_are_refused_by_name(call, tmp_path, capsys):
    assert call(name="first") == 0
    file, broken = tmp_path / "first" / "encoder.safetensors", tmp_path / "broken.safetensors"
    tensors = load_file(file)
    tensors["norm.bias"][0] = math.nan
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
    error = capsys.readouterr().err
    assert "exp_avg.safetensors" in error
    assert f"resuming from {older}" in error
    for path in list_checkpoints(folder):
        (path / "state.json").write_text("{}")
    assert call() == 2
    assert "--resume never" in capsys.readouterr().err


def test_a_full_disk_leaves_the_checkpoint_that_the_run_resumed_from(call, tmp_path, monkeypatch):
    assert call() == 0
    (tmp_path / "run" / "summary.json").unlink()
    older, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    (newest / "state.json").write_text("{}")

    def save_checkpoint(folder, **state):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(saver, "save_checkpoint", save_checkpoint)
    assert call() == 1
    assert list_checkpoints(older.parent) == [older]


def test_a_run_is_extended_when_asked_to(call, tmp_path, capsys):
    assert call() == 0
    capsys.readouterr()
    assert call("train.steps=10") == 2
    line = one_line(capsys)
    assert "train.steps was 6" in line
    assert "--extend" in line
    assert call("train.steps=10", "--extend") == 0
    folder = tmp_path / "run"
    # Also in a folder in which nothing was left to train.
    assert call("train.steps=10", "--resume", str(folder), name="copy") == 0
    assert call("train.steps=12", "--extend", name="copy") == 0
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 11))
    assert summary_of(folder)["steps"] == 10
    # From the seventh step on at the rates of a run of ten.
    assert call("train.steps=10", name="long") == 0
    rates = [[line["lr"] for line in lines_of(tmp_path / name)[6:]] for name in ("run", "long")]
    assert rates[0] == rates[1]
    capsys.readouterr()
    assert call("train.steps=8", "--extend") == 2
    assert "step 10, beyond the 8" in one_line(capsys)
    assert call("train.steps=8", "--extend", "--dry-run") == 0
    assert "step 10, beyond the 8" in capsys.readouterr().out
    assert call("train.steps=12", "--extend", "model.depth=2") == 2
    assert "model.depth was 1" in one_line(capsys)
