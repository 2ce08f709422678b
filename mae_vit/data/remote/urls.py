"""URLs of data folders and of the files in them."""

from __future__ import annotations

import os
import re
import shlex
from urllib.parse import quote, urlsplit, urlunsplit

from mae_vit.errors import InputError, nearest

# What webdataset opens, and s3.
SCHEMES = ("http", "https", "s3", "gs", "htgs", "hf", "ais", "sftp", "ftps", "scp", "pipe")
PIPE = "pipe:"
# The command line's --allow-pipe sets it, for all processes of the run: a config file cannot.
ALLOW_PIPE = "MAE_VIT_ALLOW_PIPE"
_PLACE = "{}"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Whether a data path is a URL rather than a folder; of any scheme."""
    return path.startswith(PIPE) or _SCHEME.match(path) is not None


def check_url(url: str) -> None:
    """Refuses URLs that are not opened.

    Raises:
        InputError: for an unknown scheme, a missing host, or a command that is not allowed.
    """
    scheme = url.split(":", 1)[0]
    if scheme not in SCHEMES:
        raise InputError(f'data.path={shown(url)}: no scheme "{scheme}": {nearest(scheme, SCHEMES)}')
    if url.startswith(PIPE):
        if os.environ.get(ALLOW_PIPE) != "1":
            raise InputError(f"data.path={url}: commands are only run where --allow-pipe is given")
        if _PLACE not in url:
            raise InputError(
                f"data.path={url}: give {_PLACE} where the name of a file goes (pipe:cat DIR/{{}})"
            )
    elif not urlsplit(url).netloc:
        raise InputError(f"data.path={shown(url)}: names no host: give {scheme}://HOST/FOLDER")


def file_url(folder: str, name: str) -> str:
    """Returns the URL of a file in a folder; a query, which may hold a token, stays behind the name."""
    if folder.startswith(PIPE):
        # Names are from a file that anybody may have written.
        return folder.replace(_PLACE, shlex.quote(name))
    parts = urlsplit(folder)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))


def shown(url: str) -> str:
    """Returns a URL as messages tell it: without what may be secret."""
    if url.startswith(PIPE):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.split("?", 1)[0]
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
