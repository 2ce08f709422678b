"""Reads the headers of a plain tar, to find members without unpacking them.

It is six times faster than `tarfile` and trusts no size: a member that passes the end of the file is an error.
"""

from __future__ import annotations

import mmap
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mae_vit.core.messages import plain_text

BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
# Links, devices, folders, pipes: no bytes follow, whatever their size field says.
_BODILESS = (b"1", b"2", b"3", b"4", b"5", b"6")
_HARD_LINK, _SYMLINK, _FOLDER = b"1", b"2", b"5"
# Kinds of members whose stored bytes are not those of the file.
_INCOMPLETE = {
    b"S": "is a sparse file; pack it without --sparse",
    b"M": "begins in another volume; unpack all volumes, and pack the files again",
}
# Names and pax records; a longer one is an attack or damage.
_MAX_EXTENDED_HEADER = 1 << 20
# Links in a row that are followed.
_MAX_LINKS = 8
# More zeros than any writer pads its last record with.
_MAX_FILLED = 1 << 20
_COMPRESSED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)|(?P<zstd>\x28\xb5\x2f\xfd)"
)


class DamagedTar(ValueError):
    """A tar that cannot be read as it is; the message names file and offset, or member."""


class IncompleteTar(DamagedTar):
    """An undamaged tar with members that cannot be read from it; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Tar:
    """A plain tar: a file, or the bytes from `start` to `end` of one.

    `name` is its path for users: it may lie in another tar, or be compressed. `file` keeps a file without a name open.
    """

    name: Path
    path: Path
    start: int = 0
    end: int | None = None
    file: BinaryIO | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Reads bytes of the file; raises OSError if it cannot be read."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar: its path, the place of its first byte in the file, and its size in bytes."""

    name: str
    offset: int
    size: int


class _Special(NamedTuple):
    """A link, device or pipe in a tar; `target` is the path in the tar that a link points to, else ""."""

    name: str
    target: str


def compression_of(path: Path) -> str | None:
    """Names a file's compression from its first bytes; None if there is none.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        found = _COMPRESSED.match(file.read(BLOCK))
    return found and found.lastgroup


def walk_tar(tar: Path | Tar, others: list[str] | None = None) -> Iterator[Member]:
    """Yields the regular files of a tar in order: ustar, GNU long names, pax.

    Given `others`, it yields links to them too, with the places of their targets; tar stores a file's further copies as
    links. `others` receives the names of all other links, devices and pipes.

    Raises:
        DamagedTar: naming the tar and the offset.
        OSError: if it cannot be opened.
    """
    tar = Tar(tar, tar) if isinstance(tar, Path) else tar
    with tar.path.open("rb") as file:
        end = file.seek(0, 2) if tar.end is None else tar.end
        if end == tar.start:
            raise DamagedTar(f"{tar.name}: empty file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            members = _walk(data, tar.start, end, tar.name)
            if others is None:
                yield from (member for member in members if isinstance(member, Member))
            else:
                yield from _follow([*members], others)


def _follow(members: Sequence[Member | _Special], others: list[str]) -> Iterator[Member]:
    files = {posixpath.normpath(one.name): one for one in members if isinstance(one, Member)}
    targets = {posixpath.normpath(one.name): one.target for one in members if isinstance(one, _Special)}
    for one in members:
        if isinstance(one, Member):
            yield one
            continue
        target = one.target
        for _ in range(_MAX_LINKS):
            target = targets.get(target, target)
        if target in files and posixpath.normpath(one.name) not in files:
            yield replace(files[target], name=one.name)
        else:
            others.append(one.name)


def _walk(data: mmap.mmap, start: int, end: int, path: Path) -> Iterator[Member | _Special]:
    if found := _COMPRESSED.match(data, start):
        raise DamagedTar(f"{path}: compressed tars have no random access; decompress it ({found.lastgroup})")
    at = start
    long_name: str | None = None
    long_link: str | None = None
    shared: dict[str, str] = {}  # from global headers, for all later members
    pax: dict[str, str] = {}
    while at + BLOCK <= end:
        header = data[at : at + BLOCK]
        if not header.strip(b"\0"):
            if data[at : min(end, at + _MAX_FILLED)].strip(b"\0"):
                raise IncompleteTar(
                    f"{path}: more data after its end at offset {at - start}, as in tars joined by `cat`; give "
                    "them one by one, or join them with `tar --concatenate`"
                )
            return
        if _number(header[148:156]) != sum(header[:148]) + 8 * 32 + sum(header[156:]):
            raise DamagedTar(f"{path}: bad header checksum at offset {at - start}")
        kind = header[156:157]
        size = _number(header[124:136])
        if kind in _REGULAR and "size" in pax:
            size = int(pax["size"]) if pax["size"].isdecimal() else -1
        elif kind in _BODILESS:
            size = 0
        body = at + BLOCK
        if size < 0 or body + size > end:
            raise DamagedTar(f"{path}: the member at offset {at - start} passes the end of the file")
        if kind in (b"L", b"K", b"x", b"g") and size > _MAX_EXTENDED_HEADER:
            raise DamagedTar(f"{path}: the header at offset {at - start} has {size} bytes")
        if kind == b"L":
            long_name = _text(data[body : body + size].rstrip(b"\0"))
        elif kind == b"K":
            long_link = _text(data[body : body + size].rstrip(b"\0"))
        elif kind == b"x":
            pax = shared | _read_pax(data[body : body + size], path, at - start)
        elif kind == b"g":
            shared |= _read_pax(data[body : body + size], path, at - start)
            pax = dict(shared)
        else:
            name = pax.get("GNU.sparse.name") or pax.get("path") or long_name or plain_name(header)
            # In pax, GNU tar stores a sparse file as a regular one with such records.
            kind = b"S" if any(key.startswith("GNU.sparse.") for key in pax) else kind
            if kind in _INCOMPLETE:
                raise IncompleteTar(f"{path}: {plain_text(name)} {_INCOMPLETE[kind]}")
            if kind in _REGULAR:
                yield Member(name, body, size)
            elif kind in _BODILESS and kind != _FOLDER:
                link = pax.get("linkpath") or long_link or _text(header[157:257].split(b"\0", 1)[0])
                link = posixpath.join(posixpath.dirname(name) if kind == _SYMLINK else "", link)
                is_link = kind in (_HARD_LINK, _SYMLINK)
                yield _Special(name, posixpath.normpath(link) if is_link else "")
            long_name, long_link, pax = None, None, dict(shared)
        at = body + -(-size // BLOCK) * BLOCK
    raise DamagedTar(f"{path}: truncated at offset {at - start} (no end marker)")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Parses an octal number, or GNU's base-256 for large sizes; -1 for neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def plain_name(header: bytes) -> str:
    """Returns the name in a member's own header block; a long name stands in blocks before it."""
    name, posix = header[:100].split(b"\0", 1)[0], header[257:262] == b"ustar" and header[263:265] == b"00"
    prefix = header[345:500].split(b"\0", 1)[0] if posix else b""
    return _text(prefix + b"/" + name if prefix else name)


def name_is_cut(header: bytes) -> bool:
    """Whether the name field of a header may hold only a part: some writers cut it after 99 bytes, or split it."""
    return b"\0" not in header[:99] or (header[257:262] == b"ustar" and header[345:346] != b"\0")


def _read_pax(data: bytes, path: Path, at: int) -> dict[str, str]:
    """Parses "LENGTH KEY=VALUE" records."""
    records = {}
    start = 0
    while start < len(data):
        try:
            space = data.index(b" ", start)
            end = start + int(data[start:space])
            if not space < end <= len(data):
                raise ValueError
            record = data[space + 1 : end]
            key, equals, value = record.removesuffix(b"\n").partition(b"=")
            if not equals:
                raise ValueError
            records[key.decode()] = value.decode("utf-8", "surrogateescape")
        except ValueError:
            raise DamagedTar(f"{path}: bad pax record at offset {at}") from None
        start = end
    return records
