"""Reads archives of images, which may be hostile: members are read in place, never unpacked to their own paths."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.user_files import is_image, what_file_is
from mae_vit.data.images.bounds import MAX_IMAGE_BYTES, DecodeError, check_bytes
from mae_vit.data.prepare.entries import Reader, raise_if_passing, safe_member_path
from mae_vit.data.prepare.folder_names import NAME_ENCODING
from mae_vit.data.prepare.listing import Listing
from mae_vit.data.shards import tar_headers

_TAR_NAME = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_OPENERS: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
# Images and tar headers compress far less than this; bombs reach 1,000 and, nested, millions.
_MAX_RATIO = 200
# Smaller contents are no bomb.
_SMALL_BYTES = 256 << 20
_BLOCK = 1 << 20
_ENCRYPTED, _UTF_8 = 0x1, 0x800
# Raised by zipfile and its decompressors for damaged members.
_ZIP_ERRORS = (
    zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, NotImplementedError, zlib.error
)  # fmt: skip


def is_tar(path: Path) -> bool:
    """Whether a file has the extension of a tar, compressed or not."""
    return bool(_TAR_NAME.search(path.name))


def open_tar(path: Path, spool: Spool) -> tar_headers.Tar:
    """Opens a tar for random access: the file itself, or a decompressed copy in `spool`.

    Raises:
        InputError: if it cannot be read or decompressed, or is a bomb.
    """
    kind = None
    try:
        kind = tar_headers.compression_of(path)
        if kind is None:
            return tar_headers.Tar(path, path)
        if kind not in _OPENERS:
            raise InputError(f"archive {path} is compressed with {kind}; decompress it (`{kind} -d {path}`)")
        file, bound = spool.file, _bound(path.stat().st_size)
        start = file.tell()
        with _OPENERS[kind](path) as packed:
            while block := packed.read(_BLOCK):
                if file.tell() - start + len(block) > bound:
                    raise InputError(f"archive {path} is refused: it decompresses to more than {bound} bytes")
                file.write(block)
        file.flush()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"archive {path} cannot be {'decompressed' if kind else 'read'}: {error}") from None
    return tar_headers.Tar(path, Path(f"/dev/fd/{file.fileno()}"), start, file.tell(), file)


def inner_tars(tar: tar_headers.Tar) -> list[tar_headers.Tar]:
    """Returns the tars inside a tar without images of its own, such as ImageNet's, which holds one for each class.

    Raises:
        InputError: if it is damaged, or its inner archives are compressed.
    """
    inner = []
    for member in _members(tar):
        if is_image(member.name):
            return []
        if (is_tar(Path(member.name)) or member.name.lower().endswith(".zip")) and member.size:
            name = tar.name / safe_member_path(member.name, str(tar.name))
            inner.append(
                tar_headers.Tar(name, tar.path, member.offset, member.offset + member.size, tar.file)
            )
    if packed := [plain_text(tar.name.name) for tar in inner if tar.name.suffix.lower() != ".tar"]:
        raise InputError(
            f"archive {tar.name} contains the archive {packed[0]}; unpack it, and give the folder"
        )
    return inner


def holds_images(path: Path) -> bool:
    """Whether a tar holds images or tars; False if it cannot be read."""
    with suppress(OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError), tarfile.open(path) as tar:
        return any(is_image(member.name) or is_tar(Path(member.name)) for member in tar)
    return False


def open_archive(tar: tar_headers.Tar) -> Listing:
    """Lists the images of a tar, by path; links within it are followed.

    Raises:
        InputError: if it is damaged, or holds paths that leave its folder.
    """
    where, others = str(tar.name), list[str]()
    named = [(safe_member_path(member.name, where), member) for member in _members(tar, others)]
    return _list(named, partial(read_member, tar), special=len(others))


def read_member(tar: tar_headers.Tar, member: tar_headers.Member, length: int | None = None) -> bytes:
    """Reads a member, or its first bytes; raises DecodeError if it is too large, or OSError."""
    if length is None:
        check_bytes(member.size)
    return tar.read(member.offset, member.size if length is None else min(length, member.size))


def _members(tar: tar_headers.Tar, others: list[str] | None = None) -> Iterator[tar_headers.Member]:
    try:
        yield from tar_headers.walk_tar(tar, others)
    except tar_headers.IncompleteTar as error:
        raise InputError(f"archive {error}") from None
    except (tar_headers.DamagedTar, OSError) as error:
        reason = str(error).removeprefix(f"{tar.name}: ")
        raise InputError(f"archive {tar.name} is {what_file_is(tar.path) or f'damaged: {reason}'}") from None


def open_zip(path: Path) -> Listing:
    """Lists the images of a .zip, by path.

    Raises:
        InputError: if it is damaged, a bomb, or holds paths that leave its folder.
    """
    try:
        archive = zipfile.ZipFile(path)
        names = [(_zip_name(info), info) for info in archive.infolist()]
    except _ZIP_ERRORS as error:
        raise InputError(f"archive {path} is {what_file_is(path) or f'damaged: {error}'}") from None
    # Backslashes come from Windows, or from an attacker: they are checked as separators.
    named = [(safe_member_path(name.replace("\\", "/"), str(path)), info) for name, info in names]
    # Archives written on Unix mark links and devices.
    kinds = (0, stat.S_IFREG, stat.S_IFDIR)
    regular = [(name, info) for name, info in named if stat.S_IFMT(info.external_attr >> 16) in kinds]
    members = [(name, info) for name, info in regular if not info.is_dir()]
    files = _list(members, partial(_read_zipped, archive), special=len(named) - len(regular))
    sizes, bound = {name: info.file_size for name, info in members}, _bound(path.stat().st_size)
    if (total := sum(sizes[name] for name, _ in files.images)) > bound:
        raise InputError(f"archive {path} is refused: it claims {total} bytes of images")
    return files


def _read_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, length: int | None = None) -> bytes:
    """Reads a member, or its first bytes; raises DecodeError if it is encrypted or damaged, or InputError."""
    if info.flag_bits & _ENCRYPTED:
        raise DecodeError("encrypted")
    if length is None:
        check_bytes(info.file_size)
    try:
        with archive.open(info) as member:
            return member.read(info.file_size if length is None else length)
    except _ZIP_ERRORS as error:
        raise_if_passing(str(archive.filename), error)
        raise DecodeError(str(error) or type(error).__name__) from None


def _zip_name(info: zipfile.ZipInfo) -> str:
    """Decodes a name as UTF-8 even if it is not marked as such: zipfile then assumes cp437, the default of DOS."""
    if info.flag_bits & _UTF_8 or info.filename.isascii():
        return info.filename
    return info.filename.encode("cp437").decode("utf-8", "surrogateescape")


def _list(named: Iterable[tuple[str, Any]], read: Callable[..., bytes], *, special: int) -> Listing:
    """Lists the images sorted by path; of members with the same path, the last, as unpacking would.

    `read` reads a member, or its first bytes; `special` members are no regular files.
    """
    files = Listing()
    for name, member in named:
        files.take(name, partial(read, member))
    images = dict(files.images)
    if garbled := [name for name in images if not name.isascii() and plain_text(name) != name]:
        files.notes.append(f"names such as {plain_text(garbled[-1])} are not in UTF-8; {NAME_ENCODING}")
    if copies := len(files.images) - len(images):
        files.notes.append(f"skipped {copies} earlier copies of members of the same path")
    if special:
        files.notes.append(f"skipped {special} members that are links, devices or pipes")
    files.images = sorted(images.items(), key=lambda image: image[0])
    return files


def _bound(packed: int) -> int:
    return max(_SMALL_BYTES, _MAX_RATIO * packed)


class Spool:
    """A temporary file, created on first use. It has no name, so that not even a kill leaves it behind."""

    def __init__(self, out: Path) -> None:
        """Creates no file yet; `out` is the output folder."""
        self._out = out

    @cached_property
    def file(self) -> BinaryIO:
        """The file, to append to."""
        self._out.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._out)

    def write(self, data: bytes) -> Reader:
        """Appends an image, and returns its reader; one that is too large is not written, and its reader raises."""
        offset = self.file.seek(0, os.SEEK_END)
        if len(data) <= MAX_IMAGE_BYTES:
            self.file.write(data)
            self.file.flush()
        size, file = len(data), self.file

        def read() -> bytes:
            check_bytes(size)
            return os.pread(file.fileno(), size, offset)

        return read
