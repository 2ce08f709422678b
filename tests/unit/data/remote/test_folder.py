"""Folders elsewhere: how they are named, described, refused, and read like those here."""

import errno
import fcntl
import hashlib
import importlib.util
import os

import numpy as np
import pytest
from helpers.batch_digests import digest_of_global_batches, open_located
from helpers.damage import copy_of, description
from helpers.servers.remote_shards import STEPS, first_shard, open_cache, wanted

from mae_vit.core.errors import InputError
from mae_vit.core.urls import file_url, redact_url
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.data.remote.cache import Cache, RemoteFile
from mae_vit.data.remote.download import FetchRefused, _reason
from mae_vit.data.shards.shard_files import ReadError

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_shard_that_is_gone_is_damage(source, server, tmp_path):
    index = open_located(resolve_data_path(server.url, cache_dir=str(tmp_path / "cache")))
    name = index.split_info.shards[3].file
    server.faults[name] = ["always 404"]
    sample = int(np.flatnonzero(index.shards_of(np.arange(len(index))) == 3)[0])
    for _ in range(3):
        with pytest.raises(ReadError, match="no such file"):
            index.read(sample)
    assert len(server.starts_of(name)) == 1


def test_a_shard_that_something_truncates_each_time_is_named(source, server, tmp_path, monkeypatch):
    index, fetch = open_located(resolve_data_path(server.url, cache_dir=str(tmp_path / "cache"))), Cache.fetch

    def truncated(self, file):
        path = fetch(self, file)
        os.truncate(path, 100)
        return path

    monkeypatch.setattr(Cache, "fetch", truncated)
    with pytest.raises(ReadError, match="truncated"):
        index.read(0)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("htp://host/data", 'did you mean "http"?'),
        ("http:///data", "no host"),
        ("http://127.0.0.1:1/data", "cannot be fetched"),
        ("pipe:cat /data/{}", "commands are not run"),
    ],
)
def test_urls_that_are_refused(url, said, tmp_path, monkeypatch):
    monkeypatch.setattr("mae_vit.data.remote.folder.START_PATIENCE_S", 0.1)
    with pytest.raises(InputError) as caught:
        resolve_data_path(url, cache_dir=str(tmp_path))
    assert said in str(caught.value)


def test_folders_that_are_none(server, tmp_path):
    with pytest.raises(InputError, match=r"dataset\.json"):
        resolve_data_path(f"{server.url}/elsewhere", cache_dir=str(tmp_path))
    server.faults["train-index.npy"] = ["always 404"]
    with pytest.raises(InputError, match=r"train-index\.npy"):
        open_located(resolve_data_path(server.url, cache_dir=str(tmp_path)))


def test_what_is_secret_is_not_shown(server, tmp_path):
    assert redact_url("https://me:word@host:80/data?token=abc") == "https://host:80/data"
    # A user that is part of the place is kept.
    for url, shown in (("abfs://tiles@account/x",) * 2, ("sftp://me:word@host/x", "sftp://me@host/x")):
        assert redact_url(url) == shown
    assert file_url("https://host/data/?token=abc", "a b.tar") == "https://host/data/a%20b.tar?token=abc"
    server.faults["dataset.json"] = ["always 403"]
    with pytest.raises(InputError) as caught:
        resolve_data_path(f"{server.url}/?token=abc", cache_dir=str(tmp_path))
    assert "abc" not in str(caught.value)
    error = OSError(
        "cannot read 'https://host/data?sig=a/c%3D&key=abc' now"
    )  # as aiohttp prints "?sig=a%2Fc%3D"
    assert _reason(error) == "cannot read 'https://host/data?... now"


def test_a_cache_without_locks_is_refused(server, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(
        InputError, match=r"cannot be written or locked \(function not implemented\); give another"
    ):
        resolve_data_path(server.url, cache_dir=str(tmp_path))


def test_a_described_folder_opens_without_its_server(source, server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mae_vit.data.remote.folder.START_PATIENCE_S", 0.1)
    order = GlobalOrder(len(open_index(source, "train")), 96, 7)
    folder = resolve_data_path(server.url, cache_dir=str(tmp_path))
    before = digest_of_global_batches(folder, order, "tar", 1, 0, STEPS)
    server.stop()
    again = resolve_data_path(server.url, cache_dir=str(tmp_path), say=True)
    assert "dataset.json" in capsys.readouterr().err
    assert digest_of_global_batches(again, order, "tar", 1, 0, STEPS) == before
    server.restart()


@pytest.fixture
def own(source, tmp_path, serve):
    """A copy of the shards to change, its server, and what a start finds there."""
    folder = copy_of(source, tmp_path / "data")
    url = serve(folder).url
    return folder, lambda: resolve_data_path(url, cache_dir=str(tmp_path / "cache"))


def test_changed_shards_are_fetched_anew(own):
    """The same names, other bytes: what was fetched before is not taken for them."""
    folder, resolve = own
    order = GlobalOrder(len(open_index(folder, "train")), 96, 7)
    old = digest_of_global_batches(resolve(), order, "tar", 1, 0, STEPS)
    with description(folder) as described:
        shards = described["splits"]["train"]["shards"]
        # Two shards change places.
        for key in ("samples", "bytes", "sha256"):
            shards[0][key], shards[1][key] = shards[1][key], shards[0][key]
    first, second = (folder / shard["file"] for shard in shards[:2])
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    index_in_place(folder, overwrite=True)
    near = digest_of_global_batches(folder, order, "tar", 1, 0, STEPS)
    assert digest_of_global_batches(resolve(), order, "tar", 1, 0, STEPS) == near != old


def test_a_hostile_index_is_refused(own):
    folder, resolve = own
    rows = np.load(folder / "train-index.npy")
    for name, value in (("offset", -4096), ("length", 2**30), ("shard", 70), ("length", -5)):
        bad = rows.copy()
        bad[name][5] = value
        np.save(folder / "train-index.npy", bad)
        data = (folder / "train-index.npy").read_bytes()
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        with description(folder) as described:
            described["splits"]["train"]["index"] |= facts
        with pytest.raises(InputError, match=r"train-index\.npy"):
            open_located(resolve())


def test_a_description_that_is_none_does_not_take_the_place_of_one(own):
    folder, resolve = own
    here = resolve()
    before = (here.folder / "dataset.json").read_bytes()
    (folder / "dataset.json").write_text("<html>please log in</html>")
    with pytest.raises(InputError, match=r"dataset\.json of "):
        resolve()
    assert (here.folder / "dataset.json").read_bytes() == before


def test_no_command_runs(tmp_path):
    """Whatever leads to it: a folder's own description, say."""
    with pytest.raises(FetchRefused):
        open_cache(tmp_path).fetch(RemoteFile(f"pipe:touch {tmp_path}/owned", 10, "0" * 64))
    assert not (tmp_path / "owned").exists()


def test_files_of_others_in_the_cache_folder_stay(source, server, tmp_path):
    cache = open_cache(tmp_path, limit=first_shard(source).bytes)
    for name in ("mine.tar", "a" * 63):
        (cache.folder / name).write_bytes(bytes(5000))
    (cache.folder / "folder").mkdir()
    cache.fetch(wanted(server, first_shard(source)))
    assert (cache.folder / "mine.tar").exists()
    assert (cache.folder / ("a" * 63)).exists()


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
def test_an_object_store(source, server, tmp_path, monkeypatch):
    for name, value in (
        ("AWS_ENDPOINT_URL", server.url),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    index = open_located(resolve_data_path("s3://bucket", cache_dir=str(tmp_path)))
    assert index.read(0) == open_index(source, "train").read(0)
