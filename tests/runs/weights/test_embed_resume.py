"""Embedding that is killed, stopped or refused, and goes on to the same bytes."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.commands import one_line, wait_until
from helpers.embedding import (
    call,
    content,
    done_of,
    encoded,
    partial_of,
    write_encoder,
    write_folder,
)
from helpers.images import write_zip

from mae_vit.weights.embed import embed as embedding
from mae_vit.weights.embed.embed import Settings, embed
from mae_vit.weights.embed.images import open_images
from mae_vit.weights.encoder import load_encoder


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("weights") / "encoder.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """18 images, one of them broken."""
    folder = tmp_path_factory.mktemp("images") / "folder"
    files = write_folder(folder)
    (folder / list(files)[4]).write_bytes(b"broken")
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """An archive of 400 images, some broken: some time's work with --batch-size 2."""
    files = {f"{n:05d}.png": b"broken" if n % 97 == 5 else encoded(n, "png") for n in range(400)}
    return write_zip(tmp_path_factory.mktemp("many") / "many.zip", files)


class StopAfter:
    """A stop that comes when it was asked for `times` times."""

    reason = "SIGTERM"

    def __init__(self, times: int):
        self._left = times

    def __bool__(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_stopped_anywhere_it_resumes_to_the_same_bytes(weights, folder, tmp_path, monkeypatch):
    encoder, images = load_encoder(weights), open_images([str(folder)], out=tmp_path)
    settings = Settings(torch.device("cpu"), batch_size=4)
    monkeypatch.setattr(embedding, "SAVE_EVERY_S", 0.0)
    assert embed(encoder, images, tmp_path / "whole", settings).rows == 17
    ends = 0
    for times in range(6):
        out = tmp_path / f"{times}"
        outcome = embed(encoder, images, out, settings, stop=StopAfter(times))
        assert (outcome.rows is None) == (times < 4)
        if outcome.rows is None:
            assert not out.exists()
            done = outcome.done
            outcome = embed(encoder, images, out, settings)
            assert outcome.begun == done
            ends += 1
        assert outcome.rows == 17
        assert content(out) == content(tmp_path / "whole")
        assert not partial_of(out).exists()
    assert ends == 4  # after each of the batches but the last


@pytest.mark.parametrize("killed_in", ["keep_rows", "fsync_path", "replace_folder"])
def test_killed_while_it_completes_it_resumes_to_the_same_bytes(
    weights, folder, tmp_path, monkeypatch, killed_in
):
    encoder, images = load_encoder(weights), open_images([str(folder)], out=tmp_path)
    settings = Settings(torch.device("cpu"), batch_size=4)
    out = tmp_path / "f"

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedding, killed_in, kill)
        with pytest.raises(KeyboardInterrupt):
            embed(encoder, images, out, settings)
    assert not out.exists()
    assert embed(encoder, images, out, settings).begun == len(images)
    assert embed(encoder, images, tmp_path / "whole", settings).rows == 17
    assert content(out) == content(tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(weights, many, tmp_path_factory):
    """The features of `many`, made in one go."""
    out = tmp_path_factory.mktemp("whole") / "f"
    assert call(weights, many, "--out", out, "--batch-size", "2") == 0
    return out


def test_a_signal_saves_and_the_same_command_resumes(weights, many, whole, tmp_path, capfd, monkeypatch):
    out = tmp_path / "f"
    arguments = [weights, many, "--out", out, "--batch-size", "2"]
    monkeypatch.setattr(embedding, "SAVE_EVERY_S", 0.01)

    def send() -> None:
        wait_until(lambda: done_of(out), 0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert call(*arguments) == 75
    sender.join()
    lines = capfd.readouterr().err.strip().splitlines()
    done = done_of(out)
    assert f"{done} of 400" in lines[-1]
    assert not out.exists()
    assert call(*arguments) == 0
    assert content(out) == content(whole)


@pytest.fixture
def begun(weights, folder, tmp_path, monkeypatch):
    """An output of which some images are done."""
    out = tmp_path / "f"
    settings = Settings(torch.device("cpu"), batch_size=4)
    images = open_images([str(folder)], out=tmp_path)
    assert embed(load_encoder(weights), images, out, settings, stop=StopAfter(3)).rows is None
    assert done_of(out) == 16
    return out


@pytest.mark.parametrize(
    ("options", "finished"),
    [
        *(("--img-size 24", False), ("--pool cls", True), ("--dtype float16", True)),
        *(("--precision bf16", False), ("--split test", False), ("--no-labels", True)),
    ],
)
def test_what_was_made_otherwise_is_refused(weights, folder, begun, capsys, options, finished, said):
    if finished:
        assert call(weights, folder, "--out", begun) == 0
    before = content(begun) if finished else done_of(begun)
    capsys.readouterr()
    assert call(weights, folder, "--out", begun, *options.split()) == 2
    said(one_line(capsys))
    assert (content(begun) if finished else done_of(begun)) == before
    assert partial_of(begun).exists() is not finished


def test_other_weights_and_other_files_are_refused(weights, folder, begun, tmp_path, capsys):
    other = write_encoder(tmp_path / "other.safetensors", seed=1)
    assert call(other, folder, "--out", begun) == 2
    assert f"start was {weights}" in capsys.readouterr().err
    picture = sorted(folder.rglob("*.png"))[-1]
    for path, data, key in (
        (weights, other.read_bytes(), "digest was"),
        (picture, encoded(99, "png", (30, 30)), "of other images"),
        (picture, picture.read_bytes()[::-1], "of other images"),
    ):
        kept = path.read_bytes()
        path.write_bytes(data)
        try:
            assert call(weights, folder, "--out", begun) == 2
            assert key in capsys.readouterr().err
        finally:
            path.write_bytes(kept)
    renamed = folder.with_name("renamed")
    shutil.copytree(folder, renamed)  # with other times, as on another machine
    assert call(weights, renamed, "--out", begun) == 2
    assert "(data was folder, now renamed)" in capsys.readouterr().err
    same = shutil.copy(weights, tmp_path / "same.safetensors")
    moved = shutil.copytree(folder, tmp_path / "folder", copy_function=shutil.copyfile)
    assert call(same, moved, "--out", begun) == 0


def test_other_rows_of_a_parquet_folder_are_refused(weights, tmp_path, capsys):
    (tmp_path / "pq").mkdir()
    for seed, code in ((0, 0), (9, 2)):
        rows = [{"bytes": encoded(seed + n, "png"), "path": None} for n in range(3)]
        pq.write_table(pa.table({"image": rows}), tmp_path / "pq" / "train.parquet")
        assert call(weights, tmp_path / "pq", "--out", tmp_path / "out") == code
    assert "of other images" in capsys.readouterr().err


def test_a_finished_output_is_left_as_it_is(weights, folder, begun, capsys):
    assert call(weights, folder, "--out", begun) == 0
    before = (begun / "features.npy").stat().st_mtime_ns
    capsys.readouterr()
    assert call(weights, folder, "--out", begun) == 0
    printed = capsys.readouterr().out
    for words in ("already done", "test/owl/0011.png", "17 images, 24"):
        assert words in printed
    assert (begun / "features.npy").stat().st_mtime_ns == before
    assert not partial_of(begun).exists()


@pytest.mark.parametrize("name", ["f/notes.txt", "f/features.npy", "f.partial/notes.txt"])
def test_a_folder_of_others_is_not_touched(weights, folder, tmp_path, capsys, name):
    theirs = (tmp_path / name).parent
    theirs.mkdir()
    (tmp_path / name).write_text("theirs")
    assert call(weights, folder, "--out", tmp_path / "f") == 2
    assert str(theirs) in capsys.readouterr().err
    assert content(theirs) == {Path(name).name: b"theirs"}
    assert os.listdir(tmp_path) == [theirs.name]


def test_two_processes_do_not_write_one_output(weights, folder, begun, capsys):
    with embedding._locked(begun):
        assert call(weights, folder, "--out", begun) == 2
        assert f"process {os.getpid()}" in capsys.readouterr().err
    assert call(weights, folder, "--out", begun) == 0


@pytest.mark.parametrize("damage", ["state", "no state"])
def test_a_damaged_folder_is_named(weights, folder, begun, tmp_path, capsys, damage):
    assert call(weights, folder, "--out", tmp_path / "whole", "--batch-size", "4") == 0
    partial = partial_of(begun)
    if damage == "no state":
        (partial / "state.json").unlink()
    else:
        (partial / "state.json").write_text("{")
    words = [weights, folder, "--out", begun, "--batch-size", "4"]
    if damage != "no state":
        assert call(*words) == 2
        assert f"delete {partial}" in capsys.readouterr().err.strip().splitlines()[-1]
        assert not begun.exists()
        shutil.rmtree(partial)
    assert call(*words) == 0
    assert content(begun) == content(tmp_path / "whole")
    assert not partial.exists()
