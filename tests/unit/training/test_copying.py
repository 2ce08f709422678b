"""Batches are copied to a GPU on a stream of their own; seen in the order of calls, as there is no GPU."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.training.trainer import Copier


def test_a_batch_is_copied_beside_the_gpus_work_which_waits_for_it_alone(monkeypatch):
    calls, current, device, done = [], ["computing"], torch.device("cuda", 0), set()

    def stream_of(name: str) -> SimpleNamespace:
        def record_event():
            copied = [call for call in calls if call[0] == "copy"]
            return SimpleNamespace(query=lambda: len(copied) in done)

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: calls.append(("wait", name, other.name)),
            record_event=record_event,
        )

    def on_host(name: str) -> SimpleNamespace:
        def to(device, *, non_blocking):
            calls.append(("copy", name, current[-1], non_blocking))
            return SimpleNamespace(record_stream=lambda s: calls.append(("used by", name, s.name)))

        return SimpleNamespace(to=to)

    @contextmanager
    def entered(stream):
        current.append(stream.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream_of("copying"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream_of(current[-1]))
    host = {name: on_host(name) for name in ("x", "y", "i")}
    batch, copier = (
        Batch(host["x"], host["y"], SampleKeys(3, 2, host["i"]), damaged=("some",)),
        Copier(device),
    )
    copied = copier(batch)
    # Queued on the other stream, without the host's waiting.
    assert sorted(calls[:3]) == [("copy", name, "copying", True) for name in ("i", "x", "y")]
    # What is launched from here on comes after them, and not the other way round: copies wait for no computing.
    assert calls[3] == ("wait", "computing", "copying")
    # Their memory is not given away while the GPU still reads it.
    assert sorted(calls[4:]) == [("used by", name, "computing") for name in ("i", "x", "y")]
    assert (copied.keys.seed, copied.keys.epoch, copied.damaged) == (3, 2, ("some",))
    # The loader must not write into the batch before its three copies are done.
    alive = weakref.ref(batch)
    del batch
    assert alive() is not None
    done.add(3)
    copier(Batch(host["x"], host["y"], SampleKeys(3, 2, host["i"])))
    assert alive() is None
