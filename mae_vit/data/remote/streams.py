"""Bytes from elsewhere: HTTP by Python itself, all else through webdataset's opener.

That opens HTTP by a `curl` which tries again by itself, but cannot go on in the middle of a
file, nor sees that a server has fallen silent.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Protocol
from urllib.parse import urlsplit

from webdataset.gopen import gopen

from mae_vit.core.urls import PIPE, pipe_allowed

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
        with _open_program(url, stall_s) as program:
            yield program


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
class _Program:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    stall_s: float
    first: int = 0

    def read(self) -> bytes:
        until = time.monotonic() + self.stall_s
        # Unbuffered, so that what `select` says is all there is.
        while not select.select([self.output], [], [], max(0.0, until - time.monotonic()))[0]:
            if time.monotonic() >= until:
                raise TimeoutError(f"nothing came for {self.stall_s:g} s")
        data = self.output.read(_BLOCK)
        # How it ended says whether that was all.
        if not data and (code := self._wait()):
            raise OSError(f"the program ended with exit code {code}")
        return data

    def _wait(self) -> int:
        try:
            return self.process.wait(self.stall_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the program does not end") from None


@contextmanager
def _open_program(url: str, stall_s: float) -> Iterator[_Program]:
    try:
        process, output = _start(url)
    except FileNotFoundError as error:
        raise FetchRefused(
            f"the program {os.path.basename(error.filename or '?')} is not installed"
        ) from None
    except ImportError as error:
        raise FetchRefused(f"the package {error.name} is not installed") from None
    except OSError:
        raise
    except Exception as error:  # openers raise what their libraries do
        raise FetchRefused(f"{type(error).__name__}: {error}") from None
    try:
        yield _Program(process, output, stall_s)
    finally:
        # With all that a shell has started.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        output.close()


def _start(url: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Starts what writes a file to its output."""
    own: str | list[str] | None = None
    if url.startswith(PIPE):
        # Asked here once more: whatever leads here, nothing else lets commands run.
        if not pipe_allowed():
            raise FetchRefused("commands are only run where --allow-pipe is given")
        own = url.removeprefix(PIPE)
    elif url.startswith("s3://"):
        # webdataset has no opener of its own for it.
        own = ["aws", "s3", "cp", "--only-show-errors", url, "-"]
    if own is None:
        pipe = gopen(url, "rb", bufsize=0)
        return pipe.proc, pipe.stream
    process = subprocess.Popen(
        own, shell=isinstance(own, str), stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert process.stdout is not None
    return process, process.stdout
