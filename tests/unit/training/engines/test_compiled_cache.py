"""Where compiled code is kept, and what is removed."""

import os
import time

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from mae_vit.training.engines import compiled_cache
from mae_vit.training.engines.compiled_cache import keep_compiled

CPU = torch.device("cpu")
PLACE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def root(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(PLACE, "")  # restored afterwards
    monkeypatch.delenv(PLACE)
    return tmp_path / "mae-vit" / "compiled"


def place_of(model: nn.Module, *options: object) -> str | None:
    os.environ.pop(PLACE, None)
    keep_compiled(model, CPU, *options)
    return os.environ.get(PLACE)


def test_each_geometry_has_a_private_folder(root):
    first = place_of(nn.Linear(2, 3), 8)
    assert first == place_of(nn.Linear(2, 3), 8)
    assert len({first, place_of(nn.Linear(3, 3), 8), place_of(nn.Linear(2, 3), 4)}) == 3
    assert os.path.dirname(first) == str(root)
    assert [path.stat().st_mode & 0o777 for path in (root, *root.glob("[!.]*"))] == [0o700] * 4


def test_a_place_that_is_set_stays(root, monkeypatch):
    monkeypatch.setenv(PLACE, "elsewhere")
    keep_compiled(nn.Linear(2, 3), CPU)
    assert os.environ[PLACE] == "elsewhere"
    assert not root.exists()


def test_the_place_that_torch_sets_is_replaced(root, monkeypatch):
    monkeypatch.setenv(PLACE, default_cache_dir())
    keep_compiled(nn.Linear(2, 3), CPU)
    assert os.path.dirname(os.environ[PLACE]) == str(root)


def test_a_folder_that_others_can_write_is_not_trusted(root):
    root.mkdir(parents=True)
    root.chmod(0o777)
    assert place_of(nn.Linear(2, 3)) is None
    assert not list(root.iterdir())


def test_without_a_place_or_locks_torch_keeps_its_own(root, monkeypatch):
    def no_locks(path):
        raise OSError

    monkeypatch.setattr(compiled_cache, "try_lock", no_locks)
    assert place_of(nn.Linear(2, 3)) is None
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert place_of(nn.Linear(2, 3)) is None


def test_the_oldest_go_unless_a_run_may_use_them(root):
    now, day = time.time(), 86400
    ages = {f"{number:02}": number * day / 4 for number in range(12)}
    for name, age in ages.items():
        (root / name / "triton").mkdir(parents=True)
        os.utime(root / name, (now - age, now - age))
    root.chmod(0o700)
    own = place_of(nn.Linear(2, 3))
    kept = {path.name for path in root.glob("[!.]*")}
    # The new one and seven; in a second call none is too many.
    assert kept == {os.path.basename(own), *list(ages)[:7]}
    for name in list(ages)[:7]:
        os.utime(root / name, (now, now))
    assert {place_of(nn.Linear(2, size)) for size in (4, 5)} < {str(path) for path in root.iterdir()}
    assert len(list(root.glob("[!.]*"))) == 10
