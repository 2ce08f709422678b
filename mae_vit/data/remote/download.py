"""Downloads files through fsspec: http(s) by aiohttp, s3, gs and others by the packages that fsspec names."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import fsspec

from mae_vit.core.errors import FetchUnavailable
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import is_lasting, redact_url

# What the extra "remote" does not bring.
_PACKAGES = {"abfs": "adlfs", "sftp": "paramiko", "hf": '"mae-vit[hub]"'}
# A source that sends nothing for this long is asked again.
STALL_S = 30.0
# Below this average rate a source counts as silent.
_SLOWEST_BYTES_PER_S = 1 << 16
_LONGEST_CONNECTING_S = 300.0
# A server that restarts is back by then; a run that waits longer wastes its GPUs.
PATIENCE_S = 300.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0
_WARNED_AFTER_S = 10.0
_BLOCK = 1 << 20
# `dataset.json` has 150 MB for a million shards; the size of larger files is known beforehand.
_LARGEST_UNKNOWN = 1 << 30


class FetchRefused(ValueError):
    """The source does not have the file, or forbids reading it; a retry does not help."""


class _Interrupted(Exception):
    """The file cannot be fetched now; a retry may help."""


def download(url: str, stream: BinaryIO, *, size: int | None = None, patience_s: float = PATIENCE_S) -> str:
    """Downloads a file into a stream; each try starts at the beginning. Returns the SHA-256 of the bytes.

    A file of unknown size may have 1 GiB. `patience_s` is the total time of the waits and tries. Of a try that began to
    receive, up to `STALL_S` count: a long download that breaks off at its end does not use it up.

    Raises:
        FetchRefused: if the source does not have the file, or a larger one.
        FetchUnavailable: if no try succeeds.
        OSError: if the stream cannot be written.
    """
    waited_s, wait_s, warned = 0.0, _FIRST_WAIT_S, False
    while True:
        begun = time.monotonic()
        try:
            return _download_once(url, stream, size)
        except _Interrupted as error:
            failure = f"{redact_url(url)} cannot be fetched: {error}"
        spent_s = time.monotonic() - begun
        waited_s += min(STALL_S, spent_s) if stream.tell() else spent_s
        if waited_s >= patience_s:
            raise FetchUnavailable(f"{failure} (tried again for {waited_s:.0f} s)")
        if not warned and waited_s + wait_s >= _WARNED_AFTER_S:
            warned = True
            print(f"warning: {failure}; trying for {patience_s - waited_s:.0f} s more", file=sys.stderr)
        time.sleep(wait_s)
        waited_s, wait_s = waited_s + wait_s, min(2 * wait_s, _LONGEST_WAIT_S)


def _download_once(url: str, stream: BinaryIO, size: int | None) -> str:
    stream.seek(0)
    stream.truncate()
    digest, received, largest = hashlib.sha256(), 0, _LARGEST_UNKNOWN if size is None else size
    for block in _read_blocks(url, largest):
        received += len(block)
        if received > largest:
            raise FetchRefused(f"it has more than {largest:,} bytes")
        stream.write(block)
        digest.update(block)
    if size is not None and received < size:
        raise _Interrupted(f"it ends after {received:,} of {size:,} bytes")
    stream.flush()
    return digest.hexdigest()


def _read_blocks(url: str, size: int) -> Iterator[bytes]:
    try:
        fs_options: dict[str, Any] = {}
        file_options: dict[str, Any] = {}
        if urlsplit(url).scheme in ("http", "https"):
            import aiohttp  # in the extra "remote"

            longest = _LONGEST_CONNECTING_S + size / _SLOWEST_BYTES_PER_S
            timeout = aiohttp.ClientTimeout(total=longest, sock_connect=STALL_S, sock_read=STALL_S)
            # Use the environment's proxies, as all other schemes do.
            fs_options = {"client_kwargs": {"trust_env": True}}
            # One streaming request; fsspec does not ask for a size that is given.
            file_options = {"block_size": 0, "size": size, "timeout": timeout}
        file_system, path = fsspec.core.url_to_fs(url, **fs_options)
        with file_system.open(path, "rb", **file_options) as file:
            while block := file.read(_BLOCK):
                yield block
    except ImportError as error:
        scheme = url.split(":")[0]
        package = _PACKAGES.get(scheme, '"mae-vit[remote]"')
        raise FetchRefused(f"{scheme}:// cannot be read: {error}: pip install {package}") from None
    except FileNotFoundError:
        raise FetchRefused("no such file") from None
    except Exception as error:  # the packages behind fsspec raise errors of their own
        if is_lasting(error):
            raise FetchRefused(_reason(error)) from None
        raise _Interrupted(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Formats an error without queries of URLs, which may hold a token."""
    if status := getattr(error, "status", None):
        return f"HTTP {status} {getattr(error, 'message', '')}".rstrip()
    return re.sub(r"\?\S+", "?...", error_reason(error))
