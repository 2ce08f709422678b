"""Shards come whole from a server that drops connections, stalls and sends wrong bytes, or not at all."""

import resource
import sys
import time

import fsspec
import pytest
from fsspec import AbstractFileSystem
from helpers.servers.remote_shards import first_shard, open_cache, wanted

from mae_vit.core.errors import FetchUnavailable
from mae_vit.data.remote import retry as patience
from mae_vit.data.remote.cache import RemoteFile
from mae_vit.data.remote.streams import FetchRefused, open_stream

pytestmark = pytest.mark.usefixtures("impatient")


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
    path = open_cache(tmp_path, patience_s=100).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert [entry.name for entry in path.parent.iterdir() if entry.name.endswith(".part")] == []


class Trickle(AbstractFileSystem):
    """A store that gives a byte now and then."""

    protocol = "trickle"

    def _open(self, path, mode="rb", **options):
        return self

    def open(self, path, mode="rb", **options):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def seek(self, place):
        pass

    def read(self, size):
        time.sleep(0.05)
        return b"x"


def test_a_trickle_counts_as_silence(source, tmp_path):
    """A source that sends a byte now and then does not hold up a run."""
    fsspec.register_implementation("trickle", Trickle, clobber=True)
    shard = first_shard(source)
    with pytest.raises(FetchUnavailable, match=r"bytes in 0\.3 s"):
        open_cache(tmp_path, patience_s=0.5).fetch(RemoteFile("trickle://host/x", shard.bytes, shard.sha256))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///none/x.tar", "No such file"),
        ("s3://bucket/x.tar", "needs a package that is not installed"),
        ("nonsense://x", "nonsense"),
    ],
)
def test_what_fsspec_cannot_open_is_refused(source, tmp_path, url, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(FetchRefused, match=said):
        open_cache(tmp_path).fetch(RemoteFile(url, 10, "0" * 64))


def test_a_part_of_a_file_is_not_read_again_through_fsspec(source, tmp_path):
    shard = first_shard(source)
    cache = open_cache(tmp_path)
    file = RemoteFile((source / shard.file).as_uri(), shard.bytes, shard.sha256)
    part = cache.folder / f".{shard.sha256}-{shard.bytes}.part"
    part.write_bytes((source / shard.file).read_bytes()[:1000])
    with open_stream(file.url, 1000, stall_s=1) as stream:
        assert stream.first == 1000
        assert stream.read() == (source / shard.file).read_bytes()[1000 : 1000 + (1 << 20)]
    assert cache.fetch(file).read_bytes() == (source / shard.file).read_bytes()


@pytest.mark.parametrize(("fault", "said"), [("always wrong", "other bytes"), ("always 404", "HTTP 404")])
def test_what_a_server_does_not_have_is_refused(source, server, tmp_path, fault, said):
    server.faults["*.tar"] = [fault]
    cache = open_cache(tmp_path)
    with pytest.raises(FetchRefused, match=said):
        cache.fetch(wanted(server, first_shard(source)))
    assert not cache.path(wanted(server, first_shard(source))).exists()


@pytest.mark.parametrize("fault", ["always stall", "always 500", "always short"])
def test_what_does_not_come_is_given_up_in_time(source, server, tmp_path, fault, capsys, monkeypatch):
    monkeypatch.setattr(patience, "_WARNED_AFTER_S", 0.5)
    server.faults["*.tar"] = [fault]
    shard, begun = first_shard(source), time.monotonic()
    with pytest.raises(FetchUnavailable, match=f"{shard.file} cannot be fetched"):
        # Half of what is lacking comes each time: progress, until there is none.
        open_cache(tmp_path, patience_s=1.0).fetch(wanted(server, shard))
    # In 5 s on a quiet machine.
    assert time.monotonic() - begun < 100


def test_a_full_disk_is_said(source, server, tmp_path):
    cache = open_cache(tmp_path)
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, held[1]))
    try:
        with pytest.raises(FetchUnavailable, match="cannot be written: file too large"):
            cache.fetch(wanted(server, first_shard(source)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert len(server.requests) == 1, "the server cannot help that"
