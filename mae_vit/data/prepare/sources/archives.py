"""Archives of images, which may be hostile: members are read in place and never unpacked to their own paths."""

from __future__ import annotations

import gzip
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.user_files import HEAD_BYTES
from mae_vit.data.images.decode import DecodeError, check_bytes
from mae_vit.data.prepare.entries import Listing, Reader, safe_member_path
from mae_vit.data.prepare.folder_names import NAME_ENCODING, decode_name
from mae_vit.data.shards.tar_headers import DamagedTar, Member, walk_tar

# What images and tar headers compress to stays far below; bombs reach 1,000 and, nested, millions.
_MAX_RATIO = 200
# Below this nothing is a bomb.
_SMALL_BYTES = 256 << 20
_BLOCK = 1 << 20
_ENCRYPTED, _UTF_8 = 0x1, 0x800
# What zipfile and its decompressors raise on damaged members.
_ZIP_ERRORS = (
    zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, NotImplementedError, zlib.error
)  # fmt: skip
_Any = TypeVar("_Any")


def open_archive(path: Path, out: Path, encoding: str | None = None) -> Listing:
    """Lists the images of a .tar, .tar.gz or .tgz, by path.

    Args:
        path: the archive.
        out: where a compressed one is decompressed, since it has no random access.
        encoding: of names that are not in UTF-8.

    Raises:
        InputError: if it is damaged, a bomb, or holds paths that leave its folder.
    """
    # The readers below hold the file: it is closed, and a temporary one gone, with the last.
    file = path.open("rb") if path.name.lower().endswith(".tar") else _decompress(path, out)
    plain = Path(f"/dev/fd/{file.fileno()}")
    special: list[str] = []
    try:
        members = list(walk_tar(plain, special))
    except DamagedTar as error:
        raise InputError(f"archive {path} is damaged: {str(error).removeprefix(f'{plain}: ')}") from None

    def reader(member: Member) -> Reader:
        def read() -> bytes:
            check_bytes(member.size)
            return os.pread(file.fileno(), member.size, member.offset)

        return read

    for name in special:
        safe_member_path(name, str(path))
    named = [
        (
            safe_member_path(
                decode_name(member.name.encode("utf-8", "surrogateescape"), encoding), str(path)
            ),
            member,
        )
        for member in members
    ]
    files, kept = _list(
        named, lambda member: os.pread(file.fileno(), min(HEAD_BYTES, member.size), member.offset)
    )
    files.images = [(name, reader(member)) for name, member in kept]
    _note_special(files, len(special))
    return files


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
        raise InputError(f"archive {path} is damaged: {error}") from None
    regular = [(name, info) for name, info in named if _is_regular(info)]

    def head(info: zipfile.ZipInfo) -> bytes:
        with suppress(*_ZIP_ERRORS), archive.open(info) as member:
            return member.read(HEAD_BYTES)
        return b""

    files, kept = _list(((name, info) for name, info in regular if not info.is_dir()), head)
    bound = _bound(path.stat().st_size)
    if (total := sum(info.file_size for _, info in kept)) > bound:
        raise InputError(f"archive {path} says that it holds {total} bytes of images: a bomb, refused")

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

    files.images = [(name, reader(info)) for name, info in kept]
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
    named: Iterable[tuple[str, _Any]], head: Callable[[_Any], bytes]
) -> tuple[Listing, list[tuple[str, _Any]]]:
    """Takes images and sorts them; of one path's members the last, as unpacking would."""
    files, last, copies, garbled = Listing(), dict[str, _Any](), 0, ""
    for name, member in named:
        if not files.takes(name, partial(head, member)):
            continue
        copies += name in last
        last[name] = member
        if not name.isascii() and plain_text(name) != name:
            garbled = name
    if garbled:
        files.notes.append(f"names such as {plain_text(garbled)} are not in UTF-8: {NAME_ENCODING}")
    if copies:
        files.notes.append(f"skipped {copies} earlier copies of members of the same path")
    return files, sorted(last.items(), key=lambda item: item[0])


def _note_special(files: Listing, special: int) -> None:
    if special:
        files.notes.append(f"skipped {special} members that are links, devices or pipes")


def _bound(packed: int) -> int:
    return max(_SMALL_BYTES, _MAX_RATIO * packed)


def _decompress(path: Path, out: Path) -> BinaryIO:
    """Decompresses to a temporary file in OUT, since a compressed tar has no random access.

    The file has no name, so that not even a kill leaves it behind.
    """
    out.mkdir(parents=True, exist_ok=True)
    file: BinaryIO = tempfile.TemporaryFile(dir=out)  # noqa: SIM115 - the readers outlive this function
    bound = _bound(path.stat().st_size)
    try:
        with gzip.open(path) as packed:
            while block := packed.read(_BLOCK):
                if file.tell() + len(block) > bound:
                    raise InputError(f"archive {path} grows to more than {bound} bytes: a bomb, refused")
                file.write(block)
        file.flush()
    except InputError:
        file.close()
        raise
    except (OSError, EOFError, zlib.error) as error:
        file.close()
        raise InputError(f"archive {path} cannot be decompressed: {error}") from None
    return file
