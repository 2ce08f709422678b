"""Where a state is copied to before it is written, and for how long it may lie there."""

import threading
from types import SimpleNamespace

import pytest
import torch

from mae_vit.config.schema import CheckpointSection
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints import saver as saving
from mae_vit.training.checkpoints.checkpoint import load_checkpoint
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
def allocated(monkeypatch):
    """Sizes of the buffers that `buffer` was asked for; they are small here."""
    monkeypatch.setattr(states, "_CHUNK", 4096)
    return []


def buffer(allocated: list):
    def allocate(size: int) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    return allocate


def test_a_buffer_is_used_again_and_holds_what_was_copied(allocated):
    place = Staging(torch.device("cpu"), copies=True, allocate=buffer(allocated))
    addresses = []
    for turn in range(3):
        place.begin()
        copied = place.collect((name, tensor + turn) for name, tensor in MIXED.items())
        copied |= place.collect([("wide", MIXED["half"])], torch.float32)
        place.wait()
        for name, tensor in MIXED.items():
            assert copied[name].dtype == tensor.dtype
            assert torch.equal(copied[name], tensor + turn), name
            assert copied[name].is_contiguous()
        assert copied["wide"].dtype == torch.float32
        addresses.append([tensor.data_ptr() for tensor in copied.values()])
    assert allocated == [4096, 8192]
    assert addresses[0] == addresses[1] == addresses[2]


def test_other_ranks_take_the_tensors_and_keep_none(allocated):
    place, asked = Staging(torch.device("cpu"), copies=False, allocate=buffer(allocated)), []

    def gathered():
        for name, tensor in MIXED.items():
            asked.append(name)
            yield name, tensor

    place.begin()
    assert place.collect(gathered()) == {}
    assert asked == list(MIXED)
    assert not allocated


def test_a_gpu_is_waited_for_once(allocated, monkeypatch):
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    asked = []
    copy_ = torch.Tensor.copy_

    def recording_copy(self, source, non_blocking=False):
        asked.append(non_blocking)
        return copy_(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", recording_copy)
    place = Staging(torch.device("cuda"), copies=True, allocate=buffer(allocated))
    place.begin()
    place.collect(MIXED.items())
    assert asked == [True] * len(MIXED)
    assert not waits
    place.wait()
    assert waits == ["stream"]


class Counting:
    """An engine whose only weight is the number of its step, in a buffer that is used again."""

    ranks = Ranks()

    def __init__(self, allocate) -> None:
        self.weight = torch.zeros(900)
        self._staging = Staging(torch.device("cpu"), copies=True, allocate=allocate)

    def gather(self) -> TrainState:
        self._staging.begin()
        return TrainState(self._staging.collect([("weight", self.weight)]), {}, 0)


def test_a_slow_write_is_over_before_its_buffer_is_used_again(allocated, tmp_path, monkeypatch):
    save, begun = saving.save_checkpoint, threading.Event()

    def slow(*arguments, **options):
        begun.set()
        # Long enough for a save that does not wait to come in between.
        threading.Event().wait(0.2)
        return save(*arguments, **options)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    engine = Counting(buffer(allocated))
    options = CheckpointSection(keep_last=9)
    saver = Saver(engine, tmp_path, options, identity={}, every_steps=1, say=print)
    for step in range(1, 4):
        engine.weight.fill_(step)
        begun.clear()
        saver.save(step, None, LossHistory(), wait=False)
        assert begun.wait(100)
    saver.wait()
    assert len(allocated) == 1
    for step in range(1, 4):
        state = load_checkpoint(tmp_path / f"step-{step:08d}").state
        assert torch.equal(state.parameters["weight"], torch.full((900,), float(step)))
