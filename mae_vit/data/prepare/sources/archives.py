"""Archives of images, which may be hostile: members are read in place and never unpacked to their own paths."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.user_files import HEAD_BYTES, is_image, what_file_is
from mae_vit.data.images.decode import DecodeError, check_bytes
from mae_vit.data.prepare.entries import safe_member_path
from mae_vit.data.prepare.folder_names import NAME_ENCODING, decode_name
from mae_vit.data.prepare.listing import Listing, Reader
from mae_vit.data.shards.tar_headers import (
    DamagedTar,
    IncompleteTar,
    Member,
    Special,
    Tar,
    compression_of,
    walk_tar,
)

_TAR_NAME = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_OPENERS: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
# What images and tar headers compress to stays far below; bombs reach 1,000 and, nested, millions.
_MAX_RATIO = 200
# Below this nothing is a bomb.
_SMALL_BYTES = 256 << 20
_BLOCK = 1 << 20
_ENCRYPTED, _UTF_8 = 0x1, 0x800
_MAX_LINKS = 8
# What zipfile and its decompressors raise on damaged members.
_ZIP_ERRORS = (
    zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, NotImplementedError, zlib.error
)  # fmt: skip
_Any = TypeVar("_Any")


def is_tar(path: Path) -> bool:
    """Whether a file is called as tars are, compressed or not."""
    return bool(_TAR_NAME.search(path.name))


class Spool:
    """Where compressed tars are decompressed, since they have no random access: one temporary file in OUT.

    It has no name, so that not even a kill leaves it behind.
    """

    def __init__(self, out: Path) -> None:
        """Writes nothing before it is asked to."""
        self._out = out
        self._file: BinaryIO | None = None

    def open_tar(self, path: Path) -> Tar:
        """Returns a tar that has random access: the file itself, or the decompressed one.

        Raises:
            InputError: if it cannot be read or decompressed, or is a bomb.
        """
        try:
            kind = compression_of(path)
            if kind is None:
                return Tar(path, path)
            if kind not in _OPENERS:
                raise InputError(
                    f"archive {path} is compressed by {kind}: decompress it (`{kind} -d {path}`)"
                )
            if self._file is None:
                self._out.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._out)  # noqa: SIM115 - tars hold it
            start = self._file.tell()
            _decompress(path, _OPENERS[kind], self._file)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise InputError(f"archive {path} cannot be decompressed: {error}") from None
        return Tar(path, Path(f"/dev/fd/{self._file.fileno()}"), start, self._file.tell(), self._file)


def _decompress(path: Path, opener: Callable[..., Any], file: BinaryIO) -> None:
    start, bound = file.tell(), _bound(path.stat().st_size)
    with opener(path) as packed:
        while block := packed.read(_BLOCK):
            if file.tell() - start + len(block) > bound:
                raise InputError(f"archive {path} grows to more than {bound} bytes: a bomb, refused")
            file.write(block)
    file.flush()


def inner_tars(tar: Tar) -> list[Tar]:
    """Returns the tars in a tar that holds no images itself, such as ImageNet's: one of each class.

    Raises:
        InputError: if it is damaged, or the tars in it are compressed.
    """
    inner = []
    for member in _members(tar, None):
        if is_image(member.name):
            return []
        if is_tar(Path(member.name)) and member.size:
            name = safe_member_path(member.name, str(tar.name))
            inner.append(Tar(tar.name / name, tar.path, member.offset, member.offset + member.size, tar.file))
    if packed := [one.name.name for one in inner if one.name.suffix.lower() != ".tar"]:
        raise InputError(f"archive {tar.name} holds {plain_text(packed[0])}: unpack it, and give the folder")
    return inner


def holds_images(path: Path) -> bool:
    """Whether a tar holds images, or tars that may; one that cannot be read holds none."""
    try:
        with tarfile.open(path) as tar:
            return any(is_image(member.name) or is_tar(Path(member.name)) for member in tar)
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError):
        return False


def open_archive(tar: Tar, encoding: str | None = None) -> Listing:
    """Lists the images of a tar, by path; links within it are followed.

    Args:
        tar: the archive.
        encoding: of names that are not in UTF-8.

    Raises:
        InputError: if it is damaged, or holds paths that leave its folder.
    """
    special: list[Special] = []
    members = list(_members(tar, special))

    def reader(member: Member) -> Reader:
        def read() -> bytes:
            check_bytes(member.size)
            return tar.read(member.offset, member.size)

        return read

    def plain(name: str) -> str:
        return decode_name(name.encode("utf-8", "surrogateescape"), encoding)

    def head(member: Member) -> bytes:
        return tar.read(member.offset, min(HEAD_BYTES, member.size))

    where = str(tar.name)
    named = [(safe_member_path(plain(member.name), where), member) for member in members]
    links = {safe_member_path(plain(s.name), where): s.target and plain(s.target) for s in special}
    linked = _follow(links, dict(named))
    files = _list([*named, *linked], head, reader)
    _note_special(files, len(special) - len(linked))
    return files


def _members(tar: Tar, special: list[Special] | None) -> Iterator[Member]:
    try:
        yield from walk_tar(tar, special)
    except IncompleteTar as error:
        raise InputError(f"archive {error}") from None
    except (DamagedTar, OSError) as error:
        reason = str(error).removeprefix(f"{tar.name}: ")
        raise InputError(f"archive {tar.name} is {what_file_is(tar.path) or f'damaged: {reason}'}") from None


def _follow(links: dict[str, str | None], files: dict[str, Member]) -> list[tuple[str, Member]]:
    """The links that lead to a file of the archive, with that file; tar writes copies of a file as such links."""
    found = []
    for name, target in links.items():
        for _ in range(_MAX_LINKS):
            # A member of another name than its plain one ("./a") is found by the latter.
            target = None if target is None else str(PurePosixPath(target))
            if target not in links:
                break
            target = links[target]
        if target in files:
            found.append((name, files[target]))
    return found


def open_zip(path: Path, encoding: str | None = None) -> Listing:
    """Lists the images of a .zip, by path; `encoding` is that of names that are not in UTF-8.

    Raises:
        InputError: if it is damaged, a bomb, or holds paths that leave its folder.
    """
    try:
        archive = zipfile.ZipFile(path)
        # Written on Windows, or by those who hope for it.
        named = [
            (safe_member_path(_zip_name(info, encoding).replace("\\", "/"), str(path)), info)
            for info in archive.infolist()
        ]
    except InputError:
        raise
    except _ZIP_ERRORS as error:
        raise InputError(f"archive {path} is {what_file_is(path) or f'damaged: {error}'}") from None
    regular = [(name, info) for name, info in named if _is_regular(info)]

    def reader(info: zipfile.ZipInfo) -> Reader:
        def read() -> bytes:
            if info.flag_bits & _ENCRYPTED:
                raise DecodeError("encrypted")
            check_bytes(info.file_size)
            try:
                with archive.open(info) as member:
                    return member.read(info.file_size)
            except _ZIP_ERRORS as error:
                raise DecodeError(str(error) or type(error).__name__) from None

        return read

    def head(info: zipfile.ZipInfo) -> bytes:
        with suppress(*_ZIP_ERRORS), archive.open(info) as member:
            return member.read(HEAD_BYTES)
        return b""

    files = _list(((name, info) for name, info in regular if not info.is_dir()), head, reader)
    sizes, bound = {name: info.file_size for name, info in regular}, _bound(path.stat().st_size)
    if (total := sum(sizes[name] for name, _ in files.images)) > bound:
        raise InputError(f"archive {path} says that it holds {total} bytes of images: a bomb, refused")
    _note_special(files, len(named) - len(regular))
    return files


def _is_regular(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a file or a folder; archives of Unix tell links and devices."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    return kind in (0, stat.S_IFREG, stat.S_IFDIR)


def _zip_name(info: zipfile.ZipInfo, encoding: str | None) -> str:
    """Reads a name anew that does not say that it is in UTF-8: zipfile takes it for cp437, the norm of DOS."""
    if info.flag_bits & _UTF_8 or info.filename.isascii():
        return info.filename
    return decode_name(info.filename.encode("cp437"), encoding)


def _list(
    named: Iterable[tuple[str, _Any]], head: Callable[[_Any], bytes], reader: Callable[[_Any], Reader]
) -> Listing:
    """Takes images and sorts them; of one path's members the last, as unpacking would."""
    files, last, copies, garbled = Listing(), dict[str, _Any](), 0, ""
    for name, member in named:
        if not files.takes(name, partial(head, member)):
            files.may_list(name, reader(member))
            continue
        copies += name in last
        last[name] = member
        if not name.isascii() and plain_text(name) != name:
            garbled = name
    if garbled:
        files.notes.append(f"names such as {plain_text(garbled)} are not in UTF-8: {NAME_ENCODING}")
    if copies:
        files.notes.append(f"skipped {copies} earlier copies of members of the same path")
    files.images = [(name, reader(member)) for name, member in sorted(last.items(), key=lambda item: item[0])]
    return files


def _note_special(files: Listing, special: int) -> None:
    if special:
        files.notes.append(f"skipped {special} members that are links, devices or pipes")


def _bound(packed: int) -> int:
    return max(_SMALL_BYTES, _MAX_RATIO * packed)
