"""Steps are compared with each library at its fastest, and a contender that cannot run is named."""

import pytest

from benchmarks.harness.workloads import TINY, load
from benchmarks.step import OURS, PEERS, choose, compare
from mae_vit.core.errors import InputError


def test_each_library_is_taken_at_its_fastest():
    workload = load(TINY, [], batch_size=8, precision="fp32", threads=1)
    times = {
        "ours": [10.0, 10.0, 20.0],
        "ours compiled": [5.0, 5.0, 5.0],
        "transformers eager": [11.0, 11.0, 11.0],
        "transformers sdpa": [12.0, 12.0, 12.0],
        "transformers sdpa compiled": [10.0, 10.0, 10.0],
        "official eager": [16.0, 16.0, 16.0],
        "official sdpa": [15.0, 15.0, 15.0],
    }
    speedup = compare(times, workload, None)["speedup"]
    assert speedup["transformers"]["eager"] == {
        "peer": "transformers eager",
        "median": 1.1,
        "range": [0.55, 1.1],
    }
    assert speedup["transformers"]["ours_compiled"]["median"] == 2.2
    assert speedup["transformers"]["both_compiled"]["median"] == 2.0
    assert speedup["official"]["eager"] == {"peer": "official sdpa", "median": 1.5, "range": [0.75, 1.5]}
    # None of its compiled ones took part.
    assert "both_compiled" not in speedup["official"]


def test_the_official_code_needs_its_clone(tmp_path):
    assert choose(None, "mae", None) == [*OURS, *(name for name in PEERS if "official" not in name)]
    with pytest.raises(InputError, match='"official sdpa": needs --official DIR'):
        choose(["official sdpa"], "mae", None)
    with pytest.raises(InputError, match=r"no models_mae.py there; clone github.com/facebookresearch/mae"):
        choose(None, "mae", tmp_path)
    (tmp_path / "models_mae.py").touch()
    assert choose(None, "mae", tmp_path) == [*OURS, *PEERS]
    assert choose(None, "masked_patch", tmp_path) == list(OURS)
    with pytest.raises(InputError, match='no contender "theirs" for mae: ours, ours compiled'):
        choose(["theirs"], "mae", None)
