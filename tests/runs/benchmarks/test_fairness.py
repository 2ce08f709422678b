"""What benchmarks conclude from times: means of pairs with an interval, and the fastest of equal peers."""

import os
import statistics
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.engine import BARE, compare, window
from benchmarks.engine import main as engine
from benchmarks.gpu.pictures import Kind, make_images
from benchmarks.harness.turns import at_least, at_most, mean_difference
from benchmarks.harness.workloads import TINY
from benchmarks.loader import compare as compare_loading
from benchmarks.loader import measure, warm_page_cache
from benchmarks.loading import more_peers, peers
from benchmarks.loading.contenders import OFFICIAL, PEER, PLAIN, contenders
from benchmarks.loading.rows import ROWS, prepare_data
from mae_vit.core.errors import InputError


@pytest.fixture
def devices_as_before(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def test_a_mean_counts_what_one_round_in_many_costs():
    differences = [1.0] * 19 + [21.0]
    difference = mean_difference(differences)
    assert difference["mean"] == 2.0
    assert difference["median"] == 1.0
    error = statistics.stdev(differences) / 20**0.5
    assert difference["standard_error"] == pytest.approx(error, abs=1e-3)
    # t of 19 degrees of freedom, by any table.
    assert difference["interval_95"] == pytest.approx([2 - 2.093 * error, 2 + 2.093 * error], abs=2e-3)
    with pytest.raises(ValueError, match="two rounds"):
        mean_difference([1.0])


def test_a_limit_within_the_interval_is_neither_met_nor_missed():
    intervals = [[0.2, 0.8], [0.4, 1.5], [1.2, 1.5]]
    assert [at_most(1, each)["verdict"] for each in intervals] == ["met", "unresolved", "missed"]
    assert [at_least(1, each)["verdict"] for each in intervals] == ["missed", "unresolved", "met"]
    assert (at_most(1, [0, 1])["verdict"], at_least(1, [1, 2])["verdict"]) == ("met", "met")
    results = compare({BARE: [10.0, 20.0, 30.0], "torch": [10.4, 20.6, 30.5]})
    assert results["torch"]["turns_ms"] == [10.4, 20.6, 30.5]
    assert results["torch"]["ms_over_bare"]["mean"] == 0.5
    assert results["torch"]["verdict"] == "met"


def test_a_turn_is_a_whole_window_of_the_log():
    assert window(TINY, None) == 20
    assert window(TINY, 40) == 40
    with pytest.raises(InputError, match="multiple of monitor"):
        window(TINY, 30)


@pytest.mark.usefixtures("devices_as_before")
def test_steps_that_cut_a_window_are_refused(monkeypatch, capsys):
    for words, text in (["--steps", "1"], "--steps 1: a multiple"), (["--rounds", "1"], "--rounds 1: two"):
        monkeypatch.setattr(sys, "argv", ["engine.py", *words])
        with pytest.raises(SystemExit) as ended:
            engine()
        assert ended.value.code == 2
        assert f"error: {text}" in capsys.readouterr().err


def test_the_ratio_is_against_the_fastest_peer_by_name():
    official, v2 = f"{PEER}{OFFICIAL}, 1 workers", f"{PEER}files, torchvision v2, uint8, 0 workers"
    times = {
        "ours": [1.0, 2.0, 1.0],
        official: [10.0, 10.0, 10.0],
        v2: [4.0, 4.0, 4.0],
        "memory, one box": [0.5, 0.5, 0.5],
    }
    row = replace(ROWS["full"], goal=9.0)
    result = compare_loading(times, row)
    assert result["over_fastest"] == {"peer": v2.removeprefix(PEER), "median": 4.0, "range": [2.0, 4.0]}
    # The goal is of the official pipeline, which is slower than the fastest peer.
    assert result["over_official"]["median"] == 10.0
    assert (result["over_official"]["at_least"], result["over_official"]["verdict"]) == (9.0, "unresolved")
    assert compare_loading(times, replace(row, goal=5.0))["over_official"]["verdict"] == "met"
    assert compare_loading(times, replace(row, goal=11.0))["over_official"]["verdict"] == "missed"
    assert result["images_per_s"]["ours"] == 1e6
    assert not {"over_plain", "over_fastest_with_a_worker"} & result.keys()
    times |= {f"{PEER}{PLAIN}, 0 workers": [3.0, 3.0, 3.0], f"{PEER}{PLAIN}, 1 workers": [5.0, 5.0, 5.0]}
    result = compare_loading(times, row)
    assert (result["over_plain"]["median"], result["over_plain"]["verdict"]) == (3.0, "met")
    assert result["over_fastest_with_a_worker"]["peer"] == f"{PLAIN}, 1 workers"
    # Where bytes are read, the goal is of the only peer.
    stream = compare_loading({"ours": [1.0], f"{PEER}stream": [4.0]}, replace(ROWS["raw_small"], goal=5.0))
    assert stream["over_fastest"]["verdict"] == "missed"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loading")
    for name, kind in {"photos": Kind(64, 300, 260, "jpg"), "small": Kind(130, 32, 32, "png")}.items():
        make_images(folder / f"{name}-src", kind)
    rows = [replace(ROWS[name], batches=1) for name in ("short256", "repeats4", "small_pad", "small_rrc")]
    out = folder / "data"
    out.mkdir()
    prepare_data(out, str(folder / "photos-src"), str(folder / "small-src"), rows)
    return out, rows


def test_every_peer_ends_in_as_many_images_of_a_box_each(prepared):
    folder, rows = prepared
    for row in rows:
        size, number = (32, peers.SMALL_BATCH) if row.small else (224, peers.PHOTO_BATCH)
        makers = [peers.files_pillow, peers.files_v2]
        if not row.small:
            makers += [more_peers.files_simplejpeg]
            makers += [more_peers.files_opencv] * more_peers.is_there("cv2")
            makers += [more_peers.files_torchcodec] * more_peers.is_there("torchcodec")
        batches = {make.__name__: make(row, folder, 0) for make in makers}
        if not row.small and more_peers.is_there("spdl", "torchcodec"):
            batches["spdl"] = more_peers.threads_spdl(row, folder)
        if row.small:
            makers = [peers.memory_pillow, peers.memory_v2, peers.memory_batch, peers.memory_one_box]
            batches |= {make.__name__: make(row, folder) for make in makers}
        for name, peer in batches.items():
            taken = list(peer)
            assert len(taken) == 2, name
            assert all(batch.shape == (number, 3, size, size) for batch in taken), name
            assert all(batch.dtype == torch.uint8 for batch in taken), name
        official = next(iter(peers.files_official(row, folder, 0)))
        assert official.dtype == torch.float32
        assert len(official) == number


def test_a_peer_without_its_package_takes_no_part(prepared, monkeypatch):
    folder, (photographs, *_) = prepared

    def refuse(name):
        raise OSError("a library of its is missing")

    monkeypatch.setattr(more_peers, "import_module", refuse)
    made = contenders(photographs, folder)
    assert not any(word in name for name in made for word in ("OpenCV", "torchcodec"))
    monkeypatch.setattr(more_peers, "import_module", lambda name: None)
    made = contenders(photographs, folder)
    assert sum(name.startswith(PEER) for name in made) == 13
    assert f"{PEER}{PLAIN}, 0 workers" in made


def test_all_contenders_of_a_row_measure(prepared):
    folder, (*_, pad, rrc) = prepared
    for row in (pad, rrc):
        made = contenders(row, folder)
        assert sum(name.startswith(PEER) for name in made) == 9
        names = ("ours", f"{PEER}memory, batches by torch, uint8", f"{PEER}{OFFICIAL}, 0 workers")
        assert all(made[name]()() > 0 for name in names)


@pytest.mark.slow
def test_a_row_of_photographs_is_measured_with_all_peers(prepared):
    folder, rows = prepared
    warm_page_cache(rows[0], folder)
    times = measure(rows[0], folder, repeats=1, core=max(os.sched_getaffinity(0)))
    assert list(times) == list(contenders(rows[0], folder))
    assert all(len(values) == 1 and values[0] > 0 for values in times.values())


def test_crops_of_a_batch_are_of_boxes_of_their_own(prepared, monkeypatch):
    columns = torch.arange(32, dtype=torch.uint8).mul(8).expand(64, 3, 32, 32).contiguous()
    crops = peers.resized_crops(columns)
    # Left ends and widths differ from image to image; pixels grow from left to right as in the whole.
    assert len({int(image[0, 0, 0]) for image in crops}) > 10
    assert len({int(image[0, 0, -1]) for image in crops}) > 10
    assert (crops[..., 1:].int() >= crops[..., :-1].int()).all()
    monkeypatch.setitem(peers.BOX, "scale", (1.0, 1.0))
    monkeypatch.setitem(peers.BOX, "ratio", (1.0, 1.0))
    assert (peers.resized_crops(columns).int() - columns.int()).abs().max() <= 1
