"""Shards, and a web server that has them."""

from pathlib import Path

import pytest
from helpers.damage import copy_of
from helpers.servers.faulty_http_server import Server

from mae_vit.data.remote import download


@pytest.fixture(scope="session")
def source(many_shards, tmp_path_factory) -> Path:
    """64 shards with their indexes: what a server has."""
    return copy_of(many_shards, tmp_path_factory.mktemp("source") / "data")


@pytest.fixture
def serve():
    """Serves folders until the test ends."""
    servers = []

    def call(folder: Path) -> Server:
        servers.append(Server(folder))
        return servers[-1]

    yield call
    for server in servers:
        server.stop()


@pytest.fixture
def server(serve, source):
    return serve(source)


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    """Short waits, and a cache folder of each test's own."""
    monkeypatch.setattr(download, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(download, "_LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr(download, "STALL_S", 0.3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture
def copy(digits, tmp_path) -> Path:
    """The digits, to be damaged."""
    return copy_of(digits, tmp_path / "data")
