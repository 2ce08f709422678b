"""Fine-tuning runs in this process, on the torch engine, and what they begin from."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.commands import SMALL_MAE
from helpers.finetune import SMALL, TINY
from helpers.images import prepare_pairs, write_pairs

from mae_vit.finetuning.command import main
from mae_vit.pretraining.command import main as pretrain_main


def words_of(data, folder, ckpt, config, model, small) -> list[str]:
    words = ["--config", config, *(["--ckpt", str(ckpt)] if ckpt else []), *small]
    words += ["model.img_size=8"] if ckpt else model
    return [*words, f"data.path={data}", f"run.dir={folder}", f"run.name={folder.name}"]


@pytest.fixture
def call(digits, tmp_path):
    """Fine-tunes on the digits: call("key=value", ..., name="run", ckpt=None) -> exit code."""

    def run(*arguments, name="run", ckpt=None, config="finetune_cifar_tiny", model=TINY, small=SMALL) -> int:
        return main([*words_of(digits, tmp_path / name, ckpt, config, model, small), *arguments])

    return run


@pytest.fixture
def spy(monkeypatch):
    """spy(owner, name, note) also calls `note` with the arguments whenever a function is called."""

    def replace(owner, name, note):
        before = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kwargs: (note(*args, **kwargs), before(*args, **kwargs))[1]
        )

    return replace


class Done(NamedTuple):
    """A run that others look at, too: leave it as it is."""

    folder: Path
    out: str
    err: str


@pytest.fixture(scope="session")
def shared(digits, tmp_path_factory):
    """Fine-tunes on the digits once a session: shared("key=value", ..., ckpt=None) -> Done."""
    runs: dict[tuple, Done] = {}

    def run(*arguments, ckpt=None, config="finetune_cifar_tiny", model=TINY, small=SMALL) -> Done:
        key = (*arguments, ckpt, config, *model, *small)
        if key not in runs:
            folder = tmp_path_factory.mktemp("shared") / "run"
            words = words_of(digits, folder, ckpt, config, model, small)
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                assert main([*words, *arguments]) == 0, err.getvalue()
            runs[key] = Done(folder, out.getvalue(), err.getvalue())
        return runs[key]

    return run


@pytest.fixture(scope="session")
def pretrained(digits, tmp_path_factory) -> Path:
    """A short MAE run of the tiny encoder."""
    folder = tmp_path_factory.mktemp("pretrained") / "mae"
    short = ["train.steps=4", "train.warmup_steps=1", "monitor.tensorboard=false"]
    arguments = [*SMALL_MAE, *TINY, *short, f"data.path={digits}", f"run.dir={folder}", "run.name=mae"]
    assert pretrain_main(["--config", "mae_digits", *arguments]) == 0
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """Prepared images with masks."""
    folder = tmp_path_factory.mktemp("pairs")
    prepare_pairs(write_pairs(folder / "in", count=24), folder / "out")
    return folder / "out"
