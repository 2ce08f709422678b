"""Writes files and folders so that a kill at any moment leaves the old one or the new one, whole."""

from __future__ import annotations

import getpass
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError


def user_cache() -> Path:
    """Returns this user's cache folder; a private temporary one if the home folder is read-only. Raises InputError."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(os.path.expanduser(given)) / "mae-vit"
    home = Path(os.path.expanduser("~"))
    if not (home.is_absolute() and os.access(nearest_existing(home / ".cache"), os.W_OK)):
        home = _temporary_home()
    return home / ".cache" / "mae-vit"


def settle_nameless_user() -> None:
    """Gives a user id without an account (`docker run --user 1234`) a home folder and a name.

    Without them, libraries fail or make a folder called "~".
    """
    if os.path.expanduser("~") == "~":
        # Code that needs the folder reports why there is none.
        with suppress(InputError):
            os.environ["HOME"] = str(_temporary_home())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def _temporary_home() -> Path:
    path = Path(tempfile.gettempdir()) / f"mae-vit-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        # Another user may have made a folder of this name before.
        if path.lstat().st_uid == os.getuid():
            return path
        reason = "belongs to another user"
    except OSError as error:
        reason = f"cannot be made ({error})"
    raise InputError(
        f"no cache folder: the home folder cannot be written, and {path} {reason}; set XDG_CACHE_HOME"
    )


def temporary_name(path: Path) -> Path:
    """Returns the name that a file or a folder has while this process writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name to write to, then syncs the file and renames it into place; on failure removes it."""
    partial = temporary_name(path)
    try:
        yield partial
        fsync_path(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def leaving_no_empty_folders(folder: Path) -> Iterator[None]:
    """If the body fails, removes `folder` and its parents if they are empty and did not exist before."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in new:
                path.rmdir()
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file through a temporary name; it and its name are on disk when this returns."""
    with replacing(path) as partial:
        partial.write_bytes(data)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_json_lines(path: Path) -> list[Any]:
    """Reads a file with one JSON value per line; skips lines that a kill or a full disk cut short. Raises OSError."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            values.append(json.loads(line))
    return values


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns JSON, with null for numbers that are not finite, which JSON cannot express."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fsync_path(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(partial: Path, out: Path) -> None:
    """Replaces a folder by a rename. The old one stays until the new one is there; after an OSError it is back."""
    if not out.exists():
        os.rename(partial, out)
        return
    old = partial.with_suffix(".old")
    os.rename(out, old)
    try:
        os.rename(partial, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old)


def check_not_current(folder: Path) -> None:
    """Raises InputError if replacing a folder would take the current one away from the user's shell."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise InputError(
            f"{folder} would replace the current folder; start from another one, or give another"
        )


def nearest_existing(path: Path) -> Path:
    """Returns a path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
