"""Checkpoint folders: what they hold, older ones, odd ones, and which are kept."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mae_vit.training.checkpoints.checkpoint import (
    BrokenCheckpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
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
    for mine, other in zip(
        [state.parameters, *state.optimizer_states.values()],
        [loaded.state.parameters, *loaded.state.optimizer_states.values()],
        strict=True,
    ):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def rewrite(path, **changes) -> None:
    described = json.loads((path / "state.json").read_text()) | changes
    described = {key: value for key, value in described.items() if value != "absent"}
    (path / "state.json").write_text(json.dumps(described))


def test_slots_are_names_and_no_paths(tmp_path):
    path = save_checkpoint(tmp_path, step=9, state=state_of("exp_avg"), identity={})
    rewrite(path, slots=["../../exp_avg"])
    with pytest.raises(BrokenCheckpoint, match="odd slots"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("keep_every", "expected"),
    [(None, [1100, 1200]), (5, [500, 1000, 1100, 1200]), (1, [*range(100, 1300, 100)])],
)
def test_only_the_grid_is_kept_for_good(tmp_path, keep_every, expected):
    # 512 and 1003 were saved on a signal.
    for step in sorted([*range(100, 1300, 100), 512, 1003]):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune_checkpoints(tmp_path, upto=1200, keep_last=2, keep_every=keep_every, every_steps=100)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == expected


def test_one_between_is_kept_while_it_is_the_last(tmp_path):
    for step in (500, 512):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune_checkpoints(tmp_path, upto=1200, keep_last=1, keep_every=5, every_steps=100)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000500", "step-00000512"]


def test_those_of_later_steps_do_not_count(tmp_path):
    """They were broken, or the run went back behind them."""
    for step in (0, 276, 287, 305, 400):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune_checkpoints(tmp_path, upto=287, keep_last=2, keep_every=5, every_steps=1)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [276, 287]


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
    latest = events.index(("rename", events[-2][1], tmp_path / "latest"))
    assert ("flush", tmp_path) in events[folder_renamed:latest]
    assert ("flush", events[latest][1]) in events[folder_renamed:latest]
    assert events[-1] == ("flush", tmp_path)
