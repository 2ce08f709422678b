"""Where a state is copied to before it is written, and for how long it may lie there."""

import errno
import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch

from mae_vit.config.schema import CheckpointSection
from mae_vit.core.errors import RemoteError
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints import saver as saving
from mae_vit.training.checkpoints.checkpoint import load_checkpoint
from mae_vit.training.checkpoints.remote import RemoteRun
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines import state as states
from mae_vit.training.engines.state import LossHistory, Staging, TrainState

MIXED = {
    "weights": torch.arange(600, dtype=torch.float32).view(20, 30).t(),
    "count": torch.tensor(7),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "large": torch.arange(1500.0),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def staging(monkeypatch):
    """A place for a GPU's state whose buffers are small, and the sizes of these buffers."""
    sizes = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(states, "_CHUNK", 4096)
    monkeypatch.setattr(states, "_pinned", allocate)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    return Staging(torch.device("cuda"), copies=True), sizes


def test_a_buffer_is_used_again_and_has_what_was_copied(staging):
    place, allocated = staging
    addresses = []
    for turn in range(3):
        place.begin()
        copied = place.collect((name, tensor + turn) for name, tensor in MIXED.items())
        place.wait()
        for name, tensor in MIXED.items():
            assert copied[name].dtype == tensor.dtype
            assert torch.equal(copied[name], tensor + turn), name
            assert copied[name].is_contiguous()
        addresses.append([tensor.data_ptr() for tensor in copied.values()])
    assert allocated == [4096, 8192]
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_gpu_is_waited_for_once(staging, monkeypatch):
    calls, copy_ = [], torch.Tensor.copy_
    stream = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def recording_copy(self, source, non_blocking=False):
        calls.append(non_blocking)
        return copy_(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", recording_copy)
    place, _ = staging
    place.begin()
    place.collect(MIXED.items())
    place.wait()
    assert calls == [True] * len(MIXED) + ["wait"]


def test_a_slow_write_is_over_before_its_buffer_is_used_again(staging, tmp_path, monkeypatch):
    save, begun = saving.save_checkpoint, threading.Event()
    (place, allocated), weight = staging, torch.zeros(900)

    def slow(*arguments, **options):
        begun.set()
        # Long enough for a save that does not wait to come in between.
        threading.Event().wait(0.2)
        return save(*arguments, **options)

    def gather() -> TrainState:
        place.begin()
        return TrainState(place.collect([("weight", weight)]), {}, 0)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    engine, options = SimpleNamespace(ranks=Ranks(), gather=gather), CheckpointSection(keep_last=9)
    saver = Saver(engine, tmp_path, options, identity={}, every_steps=1, say=print)
    for step in range(1, 4):
        weight.fill_(step)
        begun.clear()
        saver.save(step, None, LossHistory(), wait=False)
        assert begun.wait(100)
    saver.wait()
    assert len(allocated) == 1
    for step in range(1, 4):
        state = load_checkpoint(tmp_path / f"step-{step:08d}").state
        assert torch.equal(state.parameters["weight"], torch.full((900,), float(step)))


@pytest.fixture
def behind_url(tmp_path, monkeypatch):
    """A saver of a run behind a URL, and this run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote = RemoteRun(f"memory://{uuid4().hex}/run")
    state = TrainState({"weight": torch.zeros(5)}, {}, 0)
    engine = SimpleNamespace(ranks=Ranks(), gather=lambda: state)
    options = CheckpointSection(keep_last=1)
    saver = Saver(
        engine, remote.local / "checkpoints", options, identity={}, every_steps=1, say=print, remote=remote
    )
    return saver, remote


def test_a_store_that_removes_nothing_is_warned_of(behind_url, capsys):
    saver, remote = behind_url

    def refuse(name: str) -> None:
        if name in [path.name for path in remote.checkpoints()]:
            raise RemoteError("memory://run cannot be written: no right")

    remove, remote.remove = remote.remove, refuse
    assert all(saver.save(step, None, LossHistory(), wait=True) for step in (1, 2))
    assert [path.name for path in remote.checkpoints()] == ["step-00000001", "step-00000002"]
    said = "warning: old checkpoints stay until the next save: memory://run cannot be written: no right"
    assert said in capsys.readouterr().out
    remote.remove = remove
    assert saver.save(3, None, LossHistory(), wait=True)
    assert [path.name for path in remote.checkpoints()] == ["step-00000003"]


def test_what_may_turn_out_bad_replaces_nothing(behind_url):
    saver, remote = behind_url
    for step, streak, left in ((1, 0, [1]), (2, 2, [1, 2]), (3, 5, [1, 2, 3]), (4, 0, [4])):
        saver.save(step, None, LossHistory(streak=streak), wait=True)
        assert [path.name for path in remote.checkpoints()] == [f"step-{one:08d}" for one in left]


def test_a_full_disk_here_costs_no_checkpoint_behind_the_url(behind_url, monkeypatch):
    saver, remote = behind_url
    for step in (1, 2):
        saver.save(step, None, LossHistory(), wait=True)
    save, seen = saving.save_checkpoint, []

    def full_once(folder, **options):
        seen.append([path.name for path in remote.checkpoints()])
        if len(seen) == 1:
            raise OSError(errno.ENOSPC, "no space")
        return save(folder, **options)

    monkeypatch.setattr(saving, "save_checkpoint", full_once)
    assert saver.save(1, None, LossHistory(), wait=True)
    assert seen == [["step-00000002"]] * 2
