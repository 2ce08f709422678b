"""Shards come whole from a server that drops connections, stalls and sends wrong bytes, or not at all."""

import resource
import sys

import pytest
from helpers.servers.remote_shards import first_shard, open_cache, wanted

from mae_vit.core.errors import FetchUnavailable
from mae_vit.data.remote import download
from mae_vit.data.remote.cache import RemoteFile
from mae_vit.data.remote.download import FetchRefused

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("fault", ["stall", "short", "wrong", "503", "429", "drop"])
def test_faults_that_pass(source, server, tmp_path, fault):
    shard = first_shard(source)
    server.faults["*.tar"] = [fault, fault]
    path = open_cache(tmp_path, patience_s=100).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert len(server.starts_of(shard.file)) == 3
    assert not list(path.parent.glob("*.part"))


def test_a_source_that_is_too_slow_is_given_up(source, server, tmp_path, monkeypatch):
    """A source that sends a byte now and then does not hold up a run."""
    monkeypatch.setattr(download, "STALL_S", 60.0)
    monkeypatch.setattr(download, "_LONGEST_CONNECTING_S", 0.3)
    server.faults["*.tar"] = ["always stall"]
    with pytest.raises(FetchUnavailable, match="cannot be fetched"):
        open_cache(tmp_path, patience_s=0.1).fetch(wanted(server, first_shard(source)))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///none/x.tar", "no such file"),
        ("s3://bucket/x.tar", r"pip install .*remote"),
        ("http://127.0.0.1:1/x.tar", r"pip install .*remote"),
        ("abfs://data@account/x.tar", "pip install adlfs$"),
        ("sftp://me@host/x.tar", "pip install paramiko$"),
        ("nonsense://x", "nonsense"),
    ],
)
def test_what_fsspec_cannot_open_is_refused(tmp_path, url, reason, monkeypatch):
    for package in ("s3fs", "aiohttp", "adlfs", "paramiko"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FetchRefused, match=reason):
        open_cache(tmp_path).fetch(RemoteFile(url, 10, "0" * 64))


@pytest.mark.parametrize(
    ("fault", "reason"), [("always wrong", "other bytes"), ("always 404", "no such file")]
)
def test_what_a_server_does_not_have_is_refused(source, server, tmp_path, fault, reason):
    server.faults["*.tar"] = [fault]
    cache = open_cache(tmp_path)
    with pytest.raises(FetchRefused, match=reason):
        cache.fetch(wanted(server, first_shard(source)))
    assert not [path for path in cache.folder.iterdir() if not path.name.endswith(".lock")]


def test_a_larger_file_than_described_is_refused(source, server, tmp_path):
    shard = first_shard(source)
    smaller = RemoteFile(wanted(server, shard).url, shard.bytes - 1, shard.sha256)
    with pytest.raises(FetchRefused, match=f"more than {shard.bytes - 1:,} bytes"):
        open_cache(tmp_path).fetch(smaller)


@pytest.mark.parametrize("fault", ["always stall", "always 500", "always short"])
def test_what_does_not_come_is_given_up_in_time(source, server, tmp_path, fault, capsys, monkeypatch):
    monkeypatch.setattr(download, "_WARNED_AFTER_S", 0.5)
    server.faults["*.tar"] = [fault]
    shard = first_shard(source)
    with pytest.raises(FetchUnavailable, match=f"{shard.file} cannot be fetched"):
        open_cache(tmp_path, patience_s=1.0).fetch(wanted(server, shard))
    if "stall" in fault:  # a silent try takes 0.3 s of the patience; alone the waits would allow ten
        assert 2 <= len(server.starts_of(shard.file)) <= 5
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_full_disk_is_said(source, server, tmp_path):
    cache = open_cache(tmp_path)
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, held[1]))
    try:
        with pytest.raises(FetchUnavailable, match="file too large"):
            cache.fetch(wanted(server, first_shard(source)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert len(server.requests) == 1  # the server cannot help that
