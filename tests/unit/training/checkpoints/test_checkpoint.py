"""Checkpoint folders: what they contain, odd ones, which are kept, and files of tensors on the way to the disk."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from mae_vit.training.checkpoints.checkpoint import (
    BrokenCheckpoint,
    expired_checkpoints,
    load_checkpoint,
    save_checkpoint,
    write_tensors,
)
from mae_vit.training.engines.state import LossScale, TrainState


def state_of(*slots: str) -> TrainState:
    generator = torch.Generator().manual_seed(0)

    def tensors() -> dict[str, torch.Tensor]:
        return {name: torch.randn(2, 3, generator=generator) for name in ("a", "b.c")}

    return TrainState(tensors(), {slot: tensors() for slot in slots}, 7)


@pytest.mark.parametrize("slots", [(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq")])
@pytest.mark.parametrize("scale", [None, LossScale(512.0, 3, 11, 99)])
def test_all_of_the_state_comes_back(tmp_path, slots, scale):
    state = replace(state_of(*slots), loss_scale=scale)
    path = save_checkpoint(tmp_path, step=9, state=state, identity={"run.seed": 1})
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.identity) == (9, {"run.seed": 1})
    assert (loaded.state.optimizer_step, loaded.state.loss_scale) == (7, scale)
    assert list(loaded.state.optimizer_states) == list(slots)
    mine, others = ([s.parameters, *s.optimizer_states.values()] for s in (state, loaded.state))
    for ours, theirs in zip(mine, others, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_slots_are_names_and_no_paths(tmp_path):
    path = save_checkpoint(tmp_path, step=9, state=state_of("exp_avg"), identity={}) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"slots": ["../../exp_avg"]}))
    with pytest.raises(BrokenCheckpoint, match="odd slots"):
        load_checkpoint(path.parent)


GRID = sorted([*range(100, 1300, 100), 512, 1003])  # 512 and 1003 were saved on a signal


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        # Only the grid is kept for good.
        (GRID, {"keep_last": 2, "keep_every": None}, [1100, 1200]),
        (GRID, {"keep_last": 2, "keep_every": 5}, [500, 1000, 1100, 1200]),
        (GRID, {"keep_last": 2, "keep_every": 1}, [*range(100, 1300, 100)]),
        # One between is kept while it is the last.
        ((500, 512), {"keep_last": 1, "keep_every": 5}, [500, 512]),
        # Those of later steps do not count: they were broken, or the run went back behind them.
        (
            (0, 276, 287, 305, 400),
            {"upto": 287, "keep_last": 2, "keep_every": 5, "every_steps": 1},
            [276, 287],
        ),
    ],
)
def test_which_checkpoints_are_kept(steps, options, expected):
    paths = [Path(f"step-{step:08d}") for step in steps]
    expired = {*expired_checkpoints(paths, **{"upto": 1200, "every_steps": 100, **options})}
    assert [int(path.name[5:]) for path in paths if path not in expired] == expected


def test_all_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """After a power cut a name leads to whole bytes: files and their folder are flushed before each rename."""
    events = []

    def watched(call):
        def record(source, target):
            call(source, target)
            events.append(("rename", Path(source), Path(target)))

        return record

    def flush(descriptor, real=os.fsync):
        real(descriptor)
        events.append(("flush", Path(f"/proc/self/fd/{descriptor}").resolve()))

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    state = state_of("exp_avg", "exp_avg_sq")
    final = save_checkpoint(tmp_path, step=9, state=state, identity={"run.seed": 1})

    (folder_renamed,) = (at for at, event in enumerate(events) if event[0] == "rename" and event[2] == final)
    partial = events[folder_renamed][1]
    for file in final.iterdir():
        (renamed,) = (at for at, event in enumerate(events) if event[2:] == (partial / file.name,))
        assert ("flush", events[renamed][1]) in events[:renamed], file.name
        assert ("flush", partial) in events[renamed:folder_renamed], file.name
    assert events[folder_renamed + 1 :] == [("flush", tmp_path)]


def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    def fail(tensors, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("mae_vit.training.checkpoints.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space left") as error:
        write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(1)})
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
