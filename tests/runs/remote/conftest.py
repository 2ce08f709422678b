"""Shards, and a web server that has them."""

from unit.data.conftest import impatient, serve, server, source  # noqa: F401  fixtures
