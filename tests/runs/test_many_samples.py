"""Ten thousand shards and two million samples: what a start, a worker and a read cost does not grow with them."""

import pickle
import time

import psutil
import pytest
from helpers.commands import ROOT

from benchmarks.scaling.synthetic_shards import write_many_shards
from mae_vit.config.load import load_config
from mae_vit.data.batches.sources import TarSource
from mae_vit.data.index import open_index
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.ranks import Ranks

SHARDS, SHARD_SAMPLES = 10_000, 200
_MIB = 2**20


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """10,000 shards of 200 images: an index of 48 MB."""
    folder = tmp_path_factory.mktemp("many") / "data"
    assert write_many_shards(folder, shards=SHARDS, shard_samples=SHARD_SAMPLES) == 2_000_000
    return folder


def mapped_mib(index) -> float:
    """How much of the index this process maps now."""
    maps = psutil.Process().memory_maps()
    return sum(found.rss for found in maps if found.path == str(index.array_path)) / _MIB


def test_the_index_is_what_would_be_built(tmp_path):
    small = tmp_path / "data"
    write_many_shards(small, shards=30, shard_samples=20)
    index = open_index(small, "train")
    written = index.array_path.read_bytes()
    (small / "file-000000.tar").unlink()
    index_in_place(small, overwrite=True)
    assert open_index(small, "train").array_path.read_bytes() == written


@pytest.mark.parametrize("order", ["global", "blocks"])
def test_a_run_over_ten_thousand_shards_starts_soon(many, order):
    """CPU time, so that a busy machine does not matter: to the first batch of 64."""
    overrides = [f"data.path={many}", f"data.order={order}", "data.workers=0", "train.engine=torch"]
    overrides += [
        "data.augment.crop=random_resized",
        "train.effective_batch_size=64",
        "monitor.probe_queries=0",
    ]
    config = load_config(PretrainConfig, ROOT / "configs" / "pretrain" / "mae_cifar_tiny.yaml", overrides)
    begun = time.process_time()
    setup = set_up(config, Ranks())
    batch = next(setup.data.batches(Ranks(), setup.plan, 0, ()))
    assert time.process_time() - begun < 5
    assert batch.images.shape == (64, 3, 32, 32)
    assert setup.data.num_samples == SHARDS * SHARD_SAMPLES
    # Least of all does it look at every label.
    assert mapped_mib(setup.data.index) < 24


def test_what_a_worker_is_given_does_not_grow_with_samples(many, tmp_path):
    def given(folder) -> int:
        source = TarSource(open_index(folder, "train"), channels=3)
        return len(pickle.dumps(source))

    for samples in (10, 1000):
        write_many_shards(tmp_path / f"{samples}", shards=100, shard_samples=samples)
    assert abs(given(tmp_path / "1000") - given(tmp_path / "10")) < 64
    assert given(many) < 40 * SHARDS
