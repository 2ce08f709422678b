"""Bytes of remote files: HTTP by Python itself, every other scheme by fsspec.

fsspec's own HTTP needs aiohttp, and does not tell a server that has fallen silent from a slow one.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Protocol
from urllib.parse import urlsplit

import fsspec

_BLOCK = 1 << 20
_RETRIED_STATUS = (408, 425, 429)
_GONE_ON_FROM = re.compile(r"bytes (\d+)-")


class FetchRefused(ValueError):
    """What asking again does not change: the file is not there, or may not be read."""


class Stream(Protocol):
    """A file from a byte on."""

    @property
    def first(self) -> int:
        """Its first byte: 0 where it cannot begin elsewhere."""

    def read(self) -> bytes:
        """Returns the next bytes, none at the end.

        Raises:
            OSError: if the connection ends or falls silent before the file does.
        """


@contextmanager
def open_stream(url: str, start: int, *, stall_s: float) -> Iterator[Stream]:
    """Opens a file at a byte, or at its begin where that cannot be had.

    Args:
        url: of the file.
        start: bytes of it that are there already.
        stall_s: how long it may be silent.

    Raises:
        FetchRefused: if it cannot be had.
        OSError: if it cannot be had now.
    """
    if urlsplit(url).scheme in ("http", "https"):
        with _open_http(url, start, stall_s) as response:
            yield response
    else:
        with _open_by_fsspec(url, start) as file:
            yield file


@dataclass
class _Response:
    first: int
    response: http.client.HTTPResponse

    def read(self) -> bytes:
        try:
            data = self.response.read1(_BLOCK)
        except http.client.HTTPException as error:
            raise OSError(f"the server's answer breaks off ({type(error).__name__})") from None
        # http.client says nothing of a body that ends early.
        if not data and self.response.length:
            raise OSError(f"the connection was closed {self.response.length:,} bytes before the end")
        return data


@contextmanager
def _open_http(url: str, start: int, stall_s: float) -> Iterator[_Response]:
    # Compressed on the way, a range would be one of other bytes.
    headers = {"Accept-Encoding": "identity", "User-Agent": "mae-vit"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        # Not `urlopen`, which keeps the proxies of its first call.
        opener = urllib.request.build_opener()
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=stall_s)
    except urllib.error.HTTPError as error:
        error.close()
        said = f"HTTP {error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            # What is there already is longer than the file: it is of another.
            with _open_http(url, 0, stall_s) as whole:
                yield whole
            return
        if 400 <= error.code < 500 and error.code not in _RETRIED_STATUS:
            raise FetchRefused(said) from None
        raise OSError(said) from None
    except urllib.error.URLError as error:
        reason = error.reason
        raise reason if isinstance(reason, OSError) else OSError(str(reason)) from None
    except (http.client.InvalidURL, ValueError) as error:
        raise FetchRefused(f"no URL: {error}") from None
    except http.client.HTTPException as error:
        raise OSError(f"no answer of a web server: {type(error).__name__}") from None
    with response:
        first = 0
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            found = _GONE_ON_FROM.match(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                raise OSError("the server answers with another range than was asked for")
            first = start
        yield _Response(first, response)


@dataclass
class _File:
    first: int
    file: IO[bytes]

    def read(self) -> bytes:
        return self.file.read(_BLOCK)


@contextmanager
def _open_by_fsspec(url: str, start: int) -> Iterator[_File]:
    """Opens what fsspec opens: by the package that it names for the scheme, with that package's own time-outs."""
    try:
        file_system, path = fsspec.core.url_to_fs(url)
        file = file_system.open(path, "rb")
        file.seek(start)
    except ImportError as error:
        raise FetchRefused(f"{url.split(':')[0]}:// needs a package that is not installed: {error}") from None
    except (FileNotFoundError, PermissionError, NotImplementedError, ValueError) as error:
        raise FetchRefused(str(error) or type(error).__name__) from None
    except OSError:
        raise
    except Exception as error:  # packages raise errors of their own
        raise FetchRefused(f"{type(error).__name__}: {error}") from None
    with file:
        yield _File(start, file)
