"""URLs of data folders and of the files in them, and of run folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from mae_vit.core.errors import InputError
from mae_vit.core.messages import nearest

# Schemes whose file names are escaped in a URL; others take names as they are.
_ESCAPED = ("http", "https")
# fsspec opens the others, with s3fs, gcsfs, adlfs, huggingface_hub, paramiko or by itself.
SCHEMES = (*_ESCAPED, "s3", "gs", "abfs", "hf", "sftp", "ftp", "file")
# Of run folders.
WRITABLE_SCHEMES = ("s3", "gs", "abfs", "sftp", "file")
# Schemes whose user is part of the place: abfs://CONTAINER@ACCOUNT. Elsewhere it may be a token.
_NAMED_USERS = ("abfs", "sftp")
_PIPE = "pipe:"
NO_COMMANDS = (
    f"commands are not run; put the shards behind a URL ({', '.join(f'{scheme}://' for scheme in SCHEMES)}), or "
    "mount their folder"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Client errors that may pass: timeout, too early, too many requests.
_PASSING_STATUS = (408, 425, 429)
# Errors of botocore by name: it is an extra.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")


def is_url(path: str) -> bool:
    """Whether a data path is a URL, of any scheme, rather than a folder."""
    return path.startswith(_PIPE) or _SCHEME.match(path) is not None


def check_url(url: str, *, key: str = "data.path", schemes: Sequence[str] = SCHEMES) -> None:
    """Raises InputError for a scheme that is not in `schemes`, a missing host, or a command; `key` gives the URL."""
    if url.startswith(_PIPE):
        raise InputError(f"{key}={url}: {NO_COMMANDS}")
    if key == "data.path" and re.search(r"/[^/?]*([{*]|\.tar$)[^/]*$", url):
        raise InputError(f"{key}={redact_url(url)} points to shards; give the folder that contains them")
    scheme = url.split(":", 1)[0]
    if scheme not in schemes:
        raise InputError(f'{key}={redact_url(url)}: unknown scheme "{scheme}"; {nearest(scheme, schemes)}')
    try:
        host = urlsplit(url).netloc
    except ValueError as error:
        raise InputError(
            f"{key}={redact_url(url)}: invalid URL ({error}); give SCHEME://HOST/FOLDER"
        ) from None
    if not host and scheme != "file":
        raise InputError(f"{key}={redact_url(url)}: has no host; give {scheme}://HOST/FOLDER")


def is_lasting(error: Exception) -> bool:
    """Returns whether an error of opening a URL lasts: nothing is there, or the URL or its right to it is wrong.

    Any other may pass: the packages behind fsspec raise errors of their own for a lost connection, such as botocore's.
    """
    status = getattr(error, "status", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING_STATUS
    refused = refused or type(error).__name__ in _NO_CREDENTIALS
    return refused or isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError | ValueError)


def file_url(folder: str, name: str) -> str:
    """Returns the URL of a file in a folder; a query, which may hold a token, stays after the name."""
    parts = urlsplit(folder)
    escaped = quote(name) if parts.scheme in _ESCAPED else name
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{escaped}"))


def redact_url(path: str) -> str:
    """Returns a data path for messages: a URL without passwords and tokens."""
    if path.startswith(_PIPE) or not is_url(path):
        return path
    try:
        parts = urlsplit(path)
    except ValueError:
        return path.split("?", 1)[0]
    user, _, host = parts.netloc.rpartition("@")
    if user and parts.scheme in _NAMED_USERS:
        host = f"{user.partition(':')[0]}@{host}"
    return urlunsplit(parts._replace(netloc=host, query="", fragment=""))


def redacted(value: Any) -> Any:
    """Removes credentials from every URL in plain data, also behind `key=`."""
    if isinstance(value, dict):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner) for inner in value]
    if isinstance(value, str):
        key, equals, url = value.partition("=")
        # An "=" after "://" belongs to the URL's query.
        return f"{key}={redact_url(url)}" if equals and "://" not in key else redact_url(value)
    return value
