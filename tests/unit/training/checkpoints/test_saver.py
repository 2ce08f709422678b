"""How a state is copied before it is written, and what a saver keeps and removes."""

import errno
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch

from mae_vit.config.schema import CheckpointSection
from mae_vit.core.errors import RemoteError
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints import saver as saving
from mae_vit.training.checkpoints.remote import RemoteRun
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines import base
from mae_vit.training.engines.state import LossHistory, TrainState, to_host

MIXED = {
    "weights": torch.arange(600, dtype=torch.float32).view(20, 30).t(),
    "count": torch.tensor(7),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "large": torch.arange(1500.0),
    "none": torch.empty(0, 4),
}


def test_a_gpu_is_waited_for_once(monkeypatch):
    calls, stream = [], SimpleNamespace(synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(base, "to_host", lambda tensor, *, queued: calls.append(queued))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    engine = SimpleNamespace(device=torch.device("cuda"), ranks=Ranks(), objective=torch.nn.Module())
    engine.updates, engine.loss_scale, engine.average = 0, None, None
    base.Engine.make_state(engine, MIXED.items(), {})
    assert calls == [True] * len(MIXED) + ["wait"]


@pytest.mark.parametrize("queued", [False, True])
def test_a_state_is_copied_as_it_is_and_contiguous(queued):
    for name, tensor in MIXED.items():
        copied = to_host(tensor, queued=queued)
        assert torch.equal(copied, tensor), name
        assert copied.dtype == tensor.dtype
        assert copied.is_contiguous()
        assert copied.data_ptr() != tensor.data_ptr() or not len(tensor.flatten())


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
