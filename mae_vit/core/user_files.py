"""What the files of users look like: names of splits, kinds of images, text, paths. All readers ask here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mae_vit.core.errors import InputError

IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "avif"),
    *("ppm", "pgm", "pbm", "pnm"),
)
# Images only where no other kind is beside them: of photographs these are features, masks or metadata.
ARRAY_EXTENSIONS = ("npy", "npz", "dcm", "dicom")
# What phones and cameras write, and Pillow does not read.
_UNREAD_EXTENSIONS = ("heic", "heif", "jxl", "cr2", "cr3", "nef", "arw", "dng", "orf", "raf", "rw2")
_ALL = frozenset((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))

_SPLITS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "tst"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}

_HEADS = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"II+\0", "tif"),  # BigTIFF
    (b"MM\0+", "tif"),
    (b"\x93NUMPY", "npy"),
    (b"\xff\x0a", "jxl"),
    (b"\0\0\0\x0cJXL ", "jxl"),
)
_BRANDS = {b"avif": "avif", b"avis": "avif"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "heic"
)
HEAD_BYTES = 132  # DICOM's mark stands after 128


def is_image(path: str) -> bool:
    """Returns whether a path has an image's extension, and neither the file nor a folder of the path is hidden."""
    # String methods, because pathlib would take most of the time of a listing.
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return bool(dot) and extension.lower() in _ALL and not f"/{path}".count("/.")


def is_array(path: str) -> bool:
    """Returns whether a path has an extension of `ARRAY_EXTENSIONS`."""
    return path.rpartition(".")[2].lower() in ARRAY_EXTENSIONS


def unread_photo(path: str) -> str | None:
    """Returns the extension of a photograph that nothing here decodes, such as "heic"; None for other files."""
    name = path.rpartition("/")[2]
    extension = name.rpartition(".")[2].lower()
    return extension if extension in _UNREAD_EXTENSIONS and not f"/{path}".count("/.") else None


def split_named(name: str) -> str | None:
    """Returns the split that is exactly called so, in any common spelling and case; None for other names."""
    return _SPLIT_OF.get(name.lower())


def split_in(name: str) -> str | None:
    """Returns the split that a name holds as a word at its head or end: train_images, imagenet-val, test2017.

    Such a name may be a class, too (train_station): ask only where its neighbors are splits.
    """
    words = [re.sub(r"\d+$", "", word) for word in re.split(r"[-_. ]", name.lower())]
    return split_named(name) or split_named(words[0]) or split_named(words[-1])


def image_kind(head: bytes) -> str | None:
    """Returns the usual extension of a kind of image, by the first `HEAD_BYTES` of a file; None for others.

    It names kinds that nothing here decodes, too ("heic", "jxl").
    """
    for mark, extension in _HEADS:
        if head.startswith(mark):
            return extension
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12])
    if head[:2] == b"BM" and head[6:10] == b"\0\0\0\0":  # two reserved words
        return "bmp"
    if re.match(rb"P[1-6]\s", head):
        return "ppm"
    return "dcm" if head[128:132] == b"DICM" else None


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Reads a text file as editors save it: UTF-8 with or without a byte order mark, or UTF-16 with one.

    Raises:
        OSError: if it cannot be read.
        InputError: if it is no such text and `errors` is "strict".
    """
    content = path.read_bytes()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding, errors)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not in UTF-8: save it so (iconv -t UTF-8, or your editor)") from None


def expand_path(path: str | Path) -> Path:
    """Expands ~ and $NAME at any place, which a shell leaves in `key=~/x`; a path that exists as it is stays.

    Raises:
        InputError: if it names a variable that is not set.
    """
    text = str(path)
    if os.path.lexists(text) or not ("$" in text or text.startswith("~")):
        return Path(text)
    expanded = os.path.expanduser(os.path.expandvars(text))
    if unset := re.search(r"\$(\w+|\{\w+\})", expanded):
        raise InputError(f'path "{text}": the variable {unset[0]} is not set')
    return Path(expanded)
