"""Files of tensors: those of the safetensors library, written beside training."""

import errno
import hashlib
import threading
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from mae_vit.training.checkpoints.checkpoint import write_tensors


def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    def fail(tensors, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("mae_vit.training.checkpoints.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space left") as error:
        write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(1)})
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.weight": torch.randn(5, 3, generator=generator),
        "blocks.0.flag": torch.tensor([True, False, True]),
        "norm.num_batches_tracked": torch.tensor(7),
        "half": torch.randn(3, generator=generator).to(torch.bfloat16),
        "a.transposed": torch.randn(4, 2, generator=generator).T,
        "empty": torch.zeros(0, 2),
        "name with ü": torch.arange(3, dtype=torch.uint8),
    }


def test_the_library_reads_what_was_written(tensors, tmp_path):
    digest = write_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert digest == hashlib.sha256((tmp_path / "t.safetensors").read_bytes()).hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_states_are_written_as_the_library_writes_them(tensors, tmp_path):
    plain = {name: tensor.contiguous() for name, tensor in tensors.items() if name.isascii()}
    write_tensors(tmp_path / "t.safetensors", plain)
    assert (tmp_path / "t.safetensors").read_bytes() == save(plain)


def longest_pause(work) -> float:
    """Of this thread, while another works."""
    thread = threading.Thread(target=work)
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.slow
def test_other_threads_go_on_while_it_writes(tmp_path):
    """Against the library's `save`, which holds the interpreter's lock for as long as it copies."""
    large = {f"block.{number}": torch.ones(1 << 22) for number in range(20)}  # 335 MB
    # A busy machine makes pauses longer, never shorter.
    ours = min(longest_pause(lambda: write_tensors(tmp_path / "t.safetensors", large)) for _ in range(3))
    theirs = longest_pause(lambda: save(large))
    assert ours < theirs / 2
