"""Shards behind a web server that drops connections, stalls and sends wrong bytes."""

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from batches import digest_of_global_batches, open_digits, open_located
from commands import ROOT, SMALL_MAE, lines_of, run
from http_server import Server

from mae_vit.data.blocks import BlockOrder
from mae_vit.data.dataset import Shard, read_dataset
from mae_vit.data.feeding import check_cache, training_batches
from mae_vit.data.index import open_index
from mae_vit.data.order import GlobalOrder, Share, micro_batches
from mae_vit.data.publish import add_index
from mae_vit.data.remote import patience
from mae_vit.data.remote.cache import Cache, Wanted
from mae_vit.data.remote.folder import locate
from mae_vit.data.remote.streams import Refused
from mae_vit.data.shard_files import ReadError
from mae_vit.errors import InputError, Unreachable
from mae_vit.urls import allow_pipe, file_url, shown

STEPS = range(0, 12)


@pytest.fixture(scope="module")
def source(many_shards, tmp_path_factory) -> Path:
    """64 shards, with their indexes."""
    folder = tmp_path_factory.mktemp("source") / "data"
    shutil.copytree(many_shards, folder, ignore=shutil.ignore_patterns(".index"))
    dataset = read_dataset(folder)
    for split in ("train", "test"):
        dataset = add_index(folder, dataset, split)
    return folder


@pytest.fixture
def server(source):
    server = Server(source)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Short waits, and a cache folder of each test's own."""
    monkeypatch.setattr(patience, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(patience, "_LONGEST_WAIT_S", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def blocks(index, seed=7):
    counts = [shard.samples for shard in index.split_info.shards]
    return BlockOrder(counts, effective_batch_size=96, seed=seed, lanes=8, block_shards=2)


def first_shard(source) -> Shard:
    return read_dataset(source).splits["train"].shards[0]


def wanted(server, shard) -> Wanted:
    return Wanted(file_url(server.url, shard.file), shard.bytes, shard.sha256)


def open_cache(tmp_path, limit=1 << 30, **options) -> Cache:
    folder = tmp_path / "cache"
    folder.mkdir(exist_ok=True)
    return Cache(folder, limit, **{"stall_s": 0.3, "patience_s": 2.0, **options})


@pytest.mark.parametrize(
    ("workers", "world_size"), [(0, 1), (0, 4), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_batches_are_those_of_the_shards_here_and_each_shard_is_fetched_once(
    source, server, tmp_path, workers, world_size
):
    folder = locate(server.url, cache_dir=str(tmp_path / "cache"))
    order = GlobalOrder(len(open_index(source, "train")), 96, 7)
    near = digest_of_global_batches(source, order, "tar", 1, 0, STEPS)
    far = digest_of_global_batches(folder, order, "tar", world_size, workers, STEPS)
    assert far == near
    fetched = [name for name, _ in server.requests if name.endswith(".tar")]
    assert len(fetched) == len(set(fetched)) > 0


def test_dropped_connections_go_on_where_they_broke_off(source, server, tmp_path):
    shard = first_shard(source)
    server.faults["*.tar"] = ["drop", "drop", "drop"]
    path = open_cache(tmp_path).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert server.starts_of(shard.file)[1:] == sorted(server.starts_of(shard.file)[1:])
    assert server.starts_of(shard.file)[1] > 0
    assert server.sent[shard.file] == shard.bytes, "bytes that were there came again"


def test_a_server_without_ranges_starts_over(source, server, tmp_path):
    shard = first_shard(source)
    server.ranges, server.faults["*.tar"] = False, ["drop"]
    path = open_cache(tmp_path).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert server.sent[shard.file] == shard.bytes + shard.bytes // 2


@pytest.mark.parametrize("fault", ["stall", "short", "wrong", "503", "429", "drop"])
def test_faults_that_pass(source, server, tmp_path, fault):
    shard = first_shard(source)
    server.faults["*.tar"] = [fault, fault]
    begun = time.monotonic()
    path = open_cache(tmp_path, patience_s=20).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert time.monotonic() - begun < 10
    assert [entry.name for entry in path.parent.iterdir() if entry.name.endswith(".part")] == []


def test_a_trickle_counts_as_silence(source, tmp_path, monkeypatch):
    """A server that sends a byte now and then holds nobody up."""
    monkeypatch.setenv("MAE_VIT_ALLOW_PIPE", "1")
    shard = first_shard(source)
    begin = (source / shard.file).read_bytes()[:1]
    command = f"pipe:while printf {begin.decode(errors='replace')!r}; do sleep 0.05; done"
    with pytest.raises(Unreachable, match=r"bytes in 0\.3 s"):
        open_cache(tmp_path, patience_s=0.5).fetch(Wanted(command, shard.bytes, shard.sha256))


def test_a_command_that_falls_silent_is_ended(source, tmp_path, monkeypatch):
    monkeypatch.setenv("MAE_VIT_ALLOW_PIPE", "1")
    shard = first_shard(source)
    begun = time.monotonic()
    with pytest.raises(Unreachable, match=r"nothing came for 0\.3 s"):
        open_cache(tmp_path, patience_s=0.5).fetch(Wanted("pipe:exec sleep 60", shard.bytes, shard.sha256))
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(("fault", "said"), [("always wrong", "other bytes"), ("always 404", "HTTP 404")])
def test_what_a_server_does_not_have_is_refused(source, server, tmp_path, fault, said):
    server.faults["*.tar"] = [fault]
    cache = open_cache(tmp_path)
    with pytest.raises(Refused, match=said):
        cache.fetch(wanted(server, first_shard(source)))
    assert not cache.path(wanted(server, first_shard(source))).exists()


@pytest.mark.parametrize("fault", ["always stall", "always 500", "always short"])
def test_what_does_not_come_is_given_up_in_time(source, server, tmp_path, fault, capsys, monkeypatch):
    monkeypatch.setattr(patience, "_WARNED_AFTER_S", 0.5)
    server.faults["*.tar"] = [fault]
    shard, begun = first_shard(source), time.monotonic()
    with pytest.raises(Unreachable, match=f"{shard.file} cannot be fetched"):
        # Half of what is lacking comes each time: progress, until there is none.
        open_cache(tmp_path, patience_s=1.0).fetch(wanted(server, shard))
    assert time.monotonic() - begun < 20


def test_a_full_disk_is_said(source, server, tmp_path):
    cache = open_cache(tmp_path)
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, held[1]))
    try:
        with pytest.raises(Unreachable, match="cannot be written: file too large"):
            cache.fetch(wanted(server, first_shard(source)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert len(server.requests) == 1, "the server cannot help that"


def _fetch_all(url, folder, limit, started):
    started.wait()
    cache = Cache(Path(folder), limit)
    for shard in read_dataset(Path(url[1])).splits["train"].shards:
        cache.fetch(Wanted(file_url(url[0], shard.file), shard.bytes, shard.sha256))


def test_of_many_processes_one_fetches(source, server, tmp_path):
    server.delay_s = 0.01
    (tmp_path / "cache").mkdir()
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    arguments = ((server.url, str(source)), str(tmp_path / "cache"), 1 << 30, started)
    processes = [context.Process(target=_fetch_all, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    started.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    names = [name for name, _ in server.requests]
    assert len(names) == len(set(names)) == 64


def test_a_killed_fetch_goes_on(source, server, tmp_path):
    shard = first_shard(source)
    server.faults["*.tar"] = ["stall"]
    (tmp_path / "cache").mkdir()
    code = (
        "from pathlib import Path; from mae_vit.data.remote.cache import Cache, Wanted; "
        f"Cache(Path({str(tmp_path / 'cache')!r}), 1 << 30).fetch(Wanted({file_url(server.url, shard.file)!r}, "
        f"{shard.bytes}, {shard.sha256!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    part = tmp_path / "cache" / f".{shard.sha256}-{shard.bytes}.part"
    until = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    have = part.stat().st_size
    assert 0 < have < shard.bytes
    path = open_cache(tmp_path).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert server.starts_of(shard.file) == [0, have]


def test_the_cache_stays_within_its_bound(source, server, tmp_path):
    """And what makes room is what was used longest ago."""
    shards = read_dataset(source).splits["train"].shards
    limit = 7 * max(shard.bytes for shard in shards)
    folder = locate(server.url, cache_dir=str(tmp_path / "cache"), cache_gib=limit / 2**30)
    index = open_located(folder)
    order = blocks(index)
    near = digest_of_global_batches(source, order, "tar", 1, 0, STEPS)
    largest, ended = [0], threading.Event()

    def watch():
        while not ended.is_set():
            # By inode: one that gets its name meanwhile may be listed twice.
            sizes = {}
            for entry in os.scandir(tmp_path / "cache" / "mae-vit-shards"):
                with suppress(FileNotFoundError):
                    sizes[entry.inode()] = entry.stat().st_size
            largest[0] = max(largest[0], sum(sizes.values()))
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        far = digest_of_global_batches(folder, order, "tar", 2, 2, STEPS)
    finally:
        ended.set()
        thread.join()
    assert far == near
    assert 0 < largest[0] <= limit


def test_the_least_recently_used_goes_first(source, server, tmp_path):
    shards = [wanted(server, shard) for shard in read_dataset(source).splits["train"].shards[:4]]
    cache = open_cache(tmp_path, limit=sum(shard.bytes for shard in shards[:3]) + shards[3].bytes // 2)
    for number, shard in enumerate(shards[:3]):
        os.utime(cache.fetch(shard), (1000 + number, 1000 + number))
    os.utime(cache.path(shards[0]), (2000, 2000))
    limit = cache.limit_bytes
    cache.fetch(shards[3])
    kept = [cache.path(shard).exists() for shard in shards]
    assert kept[0]
    assert not kept[1]
    assert kept[3]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= limit


def test_shards_come_before_they_are_read(source, server, tmp_path):
    folder = locate(server.url, cache_dir=str(tmp_path / "cache"))
    index = open_located(folder)
    order, share = blocks(index), Share()
    options = {"start_step": 0, "stop_step": order.steps_per_epoch, "skipped": ()}
    batches = training_batches(
        index, open_digits(index, "tar"), order, share, node_ranks=1, workers=0, pin_memory=False, **options
    )
    next(batches)
    until = time.monotonic() + 30
    while (
        len({name for name, _ in server.requests if name.endswith(".tar")}) < 64 and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert len({name for name, _ in server.requests if name.endswith(".tar")}) == 64
    list(batches)
    names = [name for name, _ in server.requests if name.endswith(".tar")]
    assert len(names) == 64
    batches.close()
    until = time.monotonic() + 10
    while (
        any(thread.name == "shard-prefetch" for thread in threading.enumerate()) and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert not any(thread.name == "shard-prefetch" for thread in threading.enumerate())


def test_prefetching_stays_within_its_window(source, server, tmp_path):
    shards = read_dataset(source).splits["train"].shards
    limit = 40 * max(shard.bytes for shard in shards)
    folder = locate(server.url, cache_dir=str(tmp_path / "cache"), cache_gib=limit / 2**30)
    index = open_located(folder)
    order = blocks(index)
    options = {"start_step": 0, "stop_step": order.steps_per_epoch, "skipped": ()}
    batches = training_batches(
        index, open_digits(index, "tar"), order, Share(), node_ranks=1, workers=0, pin_memory=False, **options
    )
    next(batches)
    time.sleep(1)
    fetched = {name for name, _ in server.requests if name.endswith(".tar")}
    sizes = {shard.file: shard.bytes for shard in shards}
    first = set(
        index.shards_of(next(iter(micro_batches(order, Share(), start_step=0, stop_step=1)))[1]).tolist()
    )
    ahead = sum(sizes[name] for name in fetched if name not in {shards[n].file for n in first})
    assert 0 < ahead <= limit // 2
    list(batches)


def test_a_cache_too_small_for_the_order_is_refused(source, server, tmp_path):
    folder = locate(server.url, cache_dir=str(tmp_path / "cache"), cache_gib=6e-4)
    index = open_located(folder)
    everything = GlobalOrder(len(index), 96, 7)
    with pytest.raises(InputError, match=r'data\.order="global" needs .* raise data\.cache_gib'):
        check_cache(index, open_digits(index, "tar"), everything, world_size=1, node_ranks=1)
    with pytest.raises(InputError, match=r'data\.order="blocks" needs'):
        check_cache(index, open_digits(index, "tar"), blocks(index), world_size=1, node_ranks=1)


def test_keys_and_names_of_samples(source, server, tmp_path):
    near, far = (open_located(folder) for folder in (source, locate(server.url, cache_dir=str(tmp_path))))
    assert [far.find_key(n) for n in (0, 700, 1496)] == [near.find_key(n) for n in (0, 700, 1496)]
    assert far.keys() == near.keys()
    assert far.fingerprint == near.fingerprint


def test_a_shard_that_is_gone_is_damage(source, server, tmp_path):
    index = open_located(locate(server.url, cache_dir=str(tmp_path / "cache")))
    name = index.split_info.shards[3].file
    server.faults[name] = ["always 404"]
    sample = int(np.flatnonzero(index.shards_of(np.arange(len(index))) == 3)[0])
    for _ in range(3):
        with pytest.raises(ReadError, match="the shard cannot be had: HTTP 404"):
            index.read(sample)
    assert len(server.starts_of(name)) == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("htp://host/data", 'did you mean "http"?'),
        ("http:///data", "names no host"),
        ("http://127.0.0.1:1/data", "cannot be fetched"),
        ("pipe:cat /data/{}", "only run where --allow-pipe is given"),
    ],
)
def test_urls_that_are_refused(url, said, tmp_path, monkeypatch):
    monkeypatch.setattr("mae_vit.data.remote.folder.START_PATIENCE_S", 0.1)
    with pytest.raises(InputError) as caught:
        locate(url, cache_dir=str(tmp_path))
    assert said in str(caught.value)


def test_folders_that_are_none(server, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"dataset\.json: HTTP 404"):
        locate(f"{server.url}/elsewhere", cache_dir=str(tmp_path))
    server.faults["train-index.npy"] = ["always 404"]
    with pytest.raises(InputError, match=r"index train-index\.npy of .* cannot be had: HTTP 404"):
        open_located(locate(server.url, cache_dir=str(tmp_path)))


def test_what_is_secret_is_not_shown(server, tmp_path):
    assert shown("https://me:word@host:80/data?token=abc") == "https://host:80/data"
    assert file_url("https://host/data/?token=abc", "a b.tar") == "https://host/data/a%20b.tar?token=abc"
    server.faults["dataset.json"] = ["always 403"]
    with pytest.raises(InputError) as caught:
        locate(f"{server.url}/?token=abc", cache_dir=str(tmp_path))
    assert "abc" not in str(caught.value)


def test_a_described_folder_opens_without_its_server(source, server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mae_vit.data.remote.folder.START_PATIENCE_S", 0.1)
    order = GlobalOrder(len(open_index(source, "train")), 96, 7)
    folder = locate(server.url, cache_dir=str(tmp_path))
    before = digest_of_global_batches(folder, order, "tar", 1, 0, STEPS)
    server.stop()
    again = locate(server.url, cache_dir=str(tmp_path), say=True)
    assert "going on with its dataset.json of an earlier start" in capsys.readouterr().err
    assert digest_of_global_batches(again, order, "tar", 1, 0, STEPS) == before
    server.restart()


def test_changed_shards_are_fetched_anew(source, tmp_path):
    """The same names, other bytes: what was fetched before is not taken for them."""
    folder = tmp_path / "data"
    shutil.copytree(source, folder)
    server = Server(folder)
    try:
        order = GlobalOrder(len(open_index(folder, "train")), 96, 7)
        old = digest_of_global_batches(locate(server.url, cache_dir=str(tmp_path)), order, "tar", 1, 0, STEPS)
        described = json.loads((folder / "dataset.json").read_text())
        shards = described["splits"]["train"]["shards"]
        # Two shards change places.
        for key in ("samples", "bytes", "sha256"):
            shards[0][key], shards[1][key] = shards[1][key], shards[0][key]
        first, second = (folder / shard["file"] for shard in shards[:2])
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
        (folder / "dataset.json").write_text(json.dumps(described))
        add_index(folder, read_dataset(folder), "train")
        near = digest_of_global_batches(folder, order, "tar", 1, 0, STEPS)
        far = digest_of_global_batches(locate(server.url, cache_dir=str(tmp_path)), order, "tar", 1, 0, STEPS)
        assert far == near != old
    finally:
        server.stop()


def test_a_hostile_index_is_refused(source, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(source, folder)
    rows = np.load(folder / "train-index.npy")
    for name, value in (("offset", -4096), ("length", 2**30), ("shard", 70), ("length", -5)):
        bad = rows.copy()
        bad[name][5] = value
        np.save(folder / "train-index.npy", bad)
        described = json.loads((folder / "dataset.json").read_text())
        data = (folder / "train-index.npy").read_bytes()
        described["splits"]["train"]["index"] |= {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        (folder / "dataset.json").write_text(json.dumps(described))
        server = Server(folder)
        try:
            with pytest.raises(InputError, match="is not that of its shards"):
                open_located(locate(server.url, cache_dir=str(tmp_path / "cache")))
        finally:
            server.stop()


def test_a_command_gets_names_that_run_nothing():
    for name in ("x; touch owned; .tar", "-x.tar", "$(touch owned).tar", "a b.tar"):
        with pytest.raises(InputError, match="a command gets letters"):
            file_url("pipe:ssh host cat {}", name)
    with pytest.raises(InputError, match="a command gets letters"):
        file_url("pipe:ssh host 'cat {}'", "x;touch owned;.tar")


def test_a_command_runs_only_when_allowed(tmp_path):
    """Whatever leads to it: a folder's own description, say."""
    with pytest.raises(Refused, match="--allow-pipe"):
        open_cache(tmp_path).fetch(Wanted(f"pipe:touch {tmp_path}/owned", 10, "0" * 64))
    assert not (tmp_path / "owned").exists()


def test_files_of_others_in_the_cache_folder_stay(source, server, tmp_path):
    cache = open_cache(tmp_path, limit=first_shard(source).bytes)
    for name in ("mine.tar", "a" * 63):
        (cache.folder / name).write_bytes(bytes(5000))
    (cache.folder / "folder").mkdir()
    cache.fetch(wanted(server, first_shard(source)))
    assert (cache.folder / "mine.tar").exists()
    assert (cache.folder / ("a" * 63)).exists()


def test_a_description_that_is_none_does_not_take_the_place_of_one(source, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(source, copy)
    server = Server(copy)
    try:
        here = locate(server.url, cache_dir=str(tmp_path / "cache"))
        before = (here.folder / "dataset.json").read_bytes()
        (copy / "dataset.json").write_text("<html>please log in</html>")
        with pytest.raises(InputError, match=r"dataset\.json of http.* is damaged"):
            locate(server.url, cache_dir=str(tmp_path / "cache"))
        assert (here.folder / "dataset.json").read_bytes() == before
    finally:
        server.stop()


def test_a_command_brings_shards(source, tmp_path, monkeypatch):
    monkeypatch.setenv("MAE_VIT_ALLOW_PIPE", "")
    allow_pipe()
    order = GlobalOrder(len(open_index(source, "train")), 96, 7)
    near = digest_of_global_batches(source, order, "tar", 1, 0, STEPS)
    folder = locate(f"pipe:cat {source}/{{}}", cache_dir=str(tmp_path))
    assert digest_of_global_batches(folder, order, "tar", 1, 0, STEPS) == near
    with pytest.raises(InputError, match=r"give \{\} where"):
        locate("pipe:cat dataset.json", cache_dir=str(tmp_path))


@pytest.mark.skipif(shutil.which("aws") is None, reason="the aws command is not installed")
def test_an_object_store_by_its_program(source, server, tmp_path, monkeypatch):
    for name, value in (
        ("AWS_ENDPOINT_URL", server.url),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    index = open_located(locate("s3://bucket", cache_dir=str(tmp_path)))
    assert index.read(0) == open_index(source, "train").read(0)


def pretrain(url, folder, *overrides, **options):
    return run(
        "pretrain/run.py",
        *("--config", "configs/mae_digits.yaml", f"data.path={url}", f"run.dir={folder}"),
        *("train.epochs=null", "train.steps=24", "train.warmup_epochs=0", "data.source=tar"),
        *(*SMALL_MAE, "monitor.log_every_steps=1", "train.effective_batch_size=96", *overrides),
        **options,
    )


def losses(folder):
    return [line["loss"] for line in lines_of(folder) if "loss" in line]


def test_training_from_a_server_is_training_from_here(source, server, tmp_path):
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    server.faults["*.tar"] = ["drop", "", "wrong", "503", "", "drop"] * 8
    near = pretrain(source, tmp_path / "near")
    far = pretrain(server.url, tmp_path / "far", cache, "data.workers=2")
    assert (near.returncode, far.returncode) == (0, 0), far.stderr + near.stderr
    assert losses(tmp_path / "far") == losses(tmp_path / "near")
    assert f"shards of {server.url}" in far.stdout


def test_a_vanished_server_leaves_a_run_to_be_started_again(server, tmp_path):
    server.faults["*.tar"] = [*[""] * 4, "always 503"]
    folder = tmp_path / "far"
    script = (
        "import sys; from mae_vit.data.remote import cache; "
        "cache.Cache.__init__.__kwdefaults__['patience_s'] = 0.5; "
        "from pretrain.job import main; sys.exit(main())"
    )
    arguments = [
        *("--config", "configs/mae_digits.yaml", f"data.path={server.url}", f"run.dir={folder}"),
        *("train.epochs=null", "train.steps=24", "train.warmup_epochs=0", "data.source=tar", *SMALL_MAE),
        *(
            "data.workers=1",
            f"data.cache_dir={tmp_path / 'cache'}",
            "train.effective_batch_size=96",
            "data.damage_budget=0.5",
        ),
    ]
    told = run("-c", script, *arguments)
    assert told.returncode == 75, told.stdout + told.stderr
    assert "error: " in told.stderr
    assert "cannot be fetched" in told.stderr
    assert "Traceback" not in told.stderr
    server.faults.clear()
    assert run("pretrain/run.py", *arguments).returncode == 0
