"""URLs of data folders and of the files in them."""

from __future__ import annotations

import os
import re
import shlex
from urllib.parse import quote, urlsplit, urlunsplit

from mae_vit.core.errors import InputError
from mae_vit.core.messages import nearest

# Those whose files are asked for by an escaped URL; the programs of the others take names as they are.
_ESCAPED = ("http", "https", "sftp", "ftps", "scp")
# Schemes that webdataset opens, and s3.
SCHEMES = (*_ESCAPED, "s3", "gs", "htgs", "hf", "ais", "pipe")
PIPE = "pipe:"
# The command line's --allow-pipe sets it, for all processes of the run: a config file cannot.
_ALLOW_PIPE = "MAE_VIT_ALLOW_PIPE"
_PLACE = "{}"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Names are from a file that anybody may have written, and a command may hand them on to another shell.
_HARMLESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def is_url(path: str) -> bool:
    """Whether a data path is a URL rather than a folder; of any scheme."""
    return path.startswith(PIPE) or _SCHEME.match(path) is not None


def allow_pipe() -> None:
    """Lets this process, and those that it starts, run the commands of `pipe:` URLs."""
    os.environ[_ALLOW_PIPE] = "1"


def pipe_allowed() -> bool:
    """Whether commands may run."""
    return os.environ.get(_ALLOW_PIPE) == "1"


def check_url(url: str) -> None:
    """Refuses URLs that are not opened.

    Raises:
        InputError: for an unknown scheme, a missing host, or a command that is not allowed.
    """
    scheme = url.split(":", 1)[0]
    if scheme not in SCHEMES:
        raise InputError(f'data.path={redact_url(url)}: no scheme "{scheme}": {nearest(scheme, SCHEMES)}')
    if url.startswith(PIPE):
        if not pipe_allowed():
            raise InputError(f"data.path={url}: commands are only run where --allow-pipe is given")
        if _PLACE not in url:
            raise InputError(
                f"data.path={url}: give {_PLACE} where the name of a file goes (pipe:cat DIR/{{}})"
            )
        return
    try:
        host = urlsplit(url).netloc
    except ValueError as error:
        raise InputError(f"data.path={redact_url(url)}: no URL: {error}") from None
    if not host:
        raise InputError(f"data.path={redact_url(url)}: names no host: give {scheme}://HOST/FOLDER")


def file_url(folder: str, name: str) -> str:
    """Returns the URL of a file in a folder; a query, which may hold a token, stays behind the name.

    Raises:
        InputError: for a name that a command must not get.
    """
    if folder.startswith(PIPE):
        if not _HARMLESS.fullmatch(name):
            raise InputError(f"a file is named {name!a}: a command gets letters, digits, . _ - alone")
        return folder.replace(_PLACE, shlex.quote(name))
    parts = urlsplit(folder)
    escaped = quote(name) if parts.scheme in _ESCAPED else name
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{escaped}"))


def redact_url(path: str) -> str:
    """Returns a data path for messages: a URL without credentials."""
    if path.startswith(PIPE) or not is_url(path):
        return path
    try:
        parts = urlsplit(path)
    except ValueError:
        return path.split("?", 1)[0]
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
