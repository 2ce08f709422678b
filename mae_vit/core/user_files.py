"""What users' files look like: names of splits, kinds of images, text, paths. All readers use it."""

from __future__ import annotations

import os
import re
import unicodedata
from contextlib import suppress
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.urls import is_url

IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "avif"),
    *("ppm", "pgm", "pbm", "pnm"),
)
DICOM_EXTENSIONS = ("dcm", "dicom")
# Images only if no other kind is beside them: beside photographs they are features, masks or metadata.
ARRAY_EXTENSIONS = ("npy", "npz", *DICOM_EXTENSIONS)
READ_EXTENSIONS = (*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS)
# Formats of phones and cameras that Pillow does not read.
UNREAD_EXTENSIONS = ("heic", "heif", "jxl", "cr2", "cr3", "nef", "arw", "dng", "orf", "raf", "rw2",
    "pef", "srw", "nrw", "3fr", "iiq", "kdc", "mrw", "sr2", "erf", "rwl", "x3f")  # fmt: skip
# Files beside images that are known to be none: labels, captions, code, notes, files of GDAL and of systems.
OTHER_EXTENSIONS = (
    *("txt", "json", "xml", "csv", "tsv", "jsonl", "cls", "caption", "yaml", "yml", "md"),
    *("html", "py", "ipynb", "log", "sh", "db", "ini", "ovr", "msk", "tfw", "xlsx"),
)
# Other unread formats that may hold images; of further unread files it is unknown.
CONVERTIBLE_EXTENSIONS = frozenset((
    *("nd2", "czi", "lif", "oib", "oif", "svs", "ndpi", "mrxs", "vsi"),
    *("nii", "nii.gz", "mha", "mhd", "nrrd", "jp2", "j2k", "exr", "fits", "psd", "svg", "pdf", "tga", "ico"),
    *("idx", "idx.gz"),
    *("arrow", "tfrecord", "h5", "hdf5", "mat", "lmdb", "mdb", "rec", "pt", "pth", "pkl", "beton", "mp4", "avi"),
))  # fmt: skip
# The remedy for these formats.
EACH_IMAGE = "write each image as PNG or .npy, and give the folder"
TABLE_EXTENSIONS = ("csv", "tsv", "jsonl", "xlsx")
# Text files that may list images and labels.
LIST_EXTENSIONS = ("csv", "tsv", "txt")
ARCHIVE_EXTENSIONS = (
    *("zip", "tar", "tgz", "tbz", "tbz2", "txz", "tzst"),
    *("gz", "bz2", "xz", "zst", "rar", "7z"),
)
# Names of table columns and shard members that hold labels.
LABEL_NAMES = ("label", "labels", "class", "class_name", "cls", "target", "category")
_IDX = re.compile(r"[-.]idx\d-ubyte(\.gz)?$")
_HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/|@eaDir/|#recycle/|\$RECYCLE\.BIN/|DICOMDIR$)")

_SPLITS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "tst"),
    "unlabeled": ("unlabeled", "unlabelled", "no_label"),
}
_BREAK = re.compile(r"[-_. ]|(?<=[a-z])(?=[A-Z])")
_NUMBER = re.compile(r"(set)?\d*$")
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
_NO_IMAGES = (
    (b"<!doctype html", "a web page: the download failed"),
    (b"<html", "a web page: the download failed"),
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull` to get the file"),
    (b"<svg", "a drawing in SVG: convert it to PNG first"),
    (b"%pdf", "a PDF: convert it to PNG first"),
    (b"%!ps", "a drawing in PostScript: convert it to PNG first"),
    (b"8bps", "a Photoshop file: convert it to PNG first"),
)
_BRANDS = {b"avif": "avif", b"avis": "avif"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "heic"
)
_QUOTES = "\u201c\u201d\u201e\u2018\u2019"
HEAD_BYTES = 132  # DICOM's mark stands after 128


def is_image(path: str) -> bool:
    """Returns whether a path has an image's extension, and neither the file nor a folder of the path is hidden."""
    return extension_of(path) in READ_EXTENSIONS and not is_hidden(path)


def is_hidden(path: str) -> bool:
    """Returns whether a file or its folder is hidden, or belongs to the system: thumbnails, trash."""
    return bool(_HIDDEN.search(path))


def extension_of(path: str) -> str:
    """Returns the extension in lower case, without the dot; "" without one."""
    # String methods, because pathlib would take most of the time of a listing.
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return extension.lower() if dot else ""


def full_extension(path: str) -> str:
    """Returns the extension, with the inner one of a compressed file: "nii.gz"; "idx" for MNIST's arrays."""
    if idx := _IDX.search(path):
        return f"idx{idx[1] or ''}"
    extension = extension_of(path)
    inner = extension_of(path[: -len(extension) - 1]) if extension in ("gz", "bz2", "xz", "zst") else ""
    return f"{inner}.{extension}" if inner else extension


def is_placeholder(path: str) -> bool:
    """Whether a file stands for one not yet downloaded from a cloud, as iCloud's .NAME.icloud does."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(".icloud")


def split_named(name: str) -> str | None:
    """Returns the split whose name this is, in any common spelling and case; None for other names."""
    return _SPLIT_OF.get(name.lower())


def split_told(name: str) -> str:
    """Returns the split that a table's cell names: a usual one, or the cell's text as one word."""
    return split_named(name) or re.sub(r"\W", "_", name)


def split_from_path(path: Path, folder: Path, default: str) -> str:
    """Returns the split named in a path below `folder` ("imagenet-val-000012.tar"), or `default`."""
    parts = path.relative_to(folder).parts if path.is_relative_to(folder) else (path.stem,)
    words = [word for part in parts for word in re.split(r"[-_.]", part)]
    # Prefer the last word, which is nearest to the number of a shard.
    return next(filter(None, map(split_named, reversed(words))), default)


def split_and_rest(name: str) -> tuple[str | None, list[str]]:
    """Returns the split that a name holds as a word, and its other words without numbers and "set".

    Examples are train_images, imagenet-val, test2017, stage_2_test_images. The name may also be a class
    (train_station): call it only if neighboring names are splits.
    """
    words = [_NUMBER.sub("", word) for word in _BREAK.sub(" ", name).lower().split(" ")]
    for at in (0, len(words) - 1, *range(1, len(words) - 1)):
        if split := split_named(words[at]):
            return split, [word for word in words[:at] + words[at + 1 :] if word]
    return None, words


def image_kind(head: bytes) -> str | None:
    """Returns the usual extension of an image from its first `HEAD_BYTES`, also if unread ("heic"); else None."""
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


def what_is(head: bytes) -> str | None:
    """Says what a file is that cannot be read as an image, with the remedy; None if its first bytes do not tell."""
    if not head:
        return "an empty file; is it a cloud placeholder, not downloaded?"
    if (kind := image_kind(head)) in UNREAD_EXTENSIONS:
        return (
            f"a photograph in the format {str(kind).upper()}, which cannot be read: convert it to JPEG first"
        )
    text = head.lstrip(b"\xef\xbb\xbf \r\n\t").lower()
    return next((what for mark, what in _NO_IMAGES if text.startswith(mark)), None)


def what_file_is(path: Path) -> str | None:
    """Calls `what_is` for a file; None also if the file is empty or cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        return what_is(head) if head else None
    return None


def read_text(path: Path) -> str:
    """Reads a text file as `decode_text` does; raises OSError, too."""
    return decode_text(path.read_bytes(), str(path))


def decode_text(content: bytes, where: str, *, errors: str = "strict") -> str:
    """Decodes a text as editors save it: UTF-8, also with a byte order mark, or UTF-16 with one. Raises InputError."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding, errors)
    except UnicodeDecodeError:
        what = "not in UTF-8; save it so (Excel: CSV UTF-8), or convert it (iconv -f WINDOWS-1252 -t UTF-8)"
        if content.startswith(b"PK\x03\x04"):
            what = "an Excel workbook or an archive; save its text as UTF-8 (Excel: CSV UTF-8)"
        raise InputError(f"{where} is {what}") from None


def expand_text(text: str) -> str:
    """Expands ~ and $NAME at any place, which a shell leaves in `key=~/x`; a URL or a path that exists stays as it is.

    Raises:
        InputError: if it names a variable that is not set, is a Windows path, or if a name that does not exist has
            characters of pasted text: the end of a Windows line, or quotes of a web page.
    """
    if os.path.lexists(text):
        return text
    if not is_url(text) and ("$" in text or text.startswith("~")):
        expanded = os.path.expanduser(os.path.expandvars(text))
        if unset := re.search(r"\$(\w+|\{\w+\})", expanded):
            raise InputError(f'path "{text}": the variable {unset[0]} is not set; set it')
        text = expanded
    _check_written(text)
    return text


def _check_written(text: str) -> None:
    """Refuses Windows paths, and names that do not exist with characters of pasted text."""
    if not text:
        raise InputError("a path is empty; is a variable unset?")
    parts = text.split("/")
    for at, part in enumerate(parts):
        if os.path.lexists("/".join(parts[: at + 1])):
            continue  # an existing name may hold any character
        alien = [c for c in part if unicodedata.category(c) == "Cc"]
        # At either end of a name: invisible, or a quote of text editors.
        ends = part[:1] + part[-1:]
        alien += [c for c in ends if c in _QUOTES or unicodedata.category(c) in ("Cf", "Zs", "Zl", "Zp")]
        if alien:
            named = ", ".join(f"U+{ord(c):04X} ({unicodedata.name(c, 'a control character')})" for c in alien)
            raise InputError(f'path "{plain_text(text)}" contains {named}; write it without')
    if (drive := re.match(r"([A-Za-z]):[\\/]", text)) and not os.path.lexists(parts[0]):
        there = f"/mnt/{drive[1].lower()}/{text[3:]}".replace("\\", "/")
        raise InputError(f'path "{text}" is a Windows path; in WSL write {there}')


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Returns `expand_text` as a path."""
    return Path(expand_text(name_given(path, "a path")))


def name_given(value: object, forms: str) -> str:
    """Returns a path or a name as text; raises InputError, which asks for `forms`, for other types."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise InputError(f"give {forms}, not {type(value).__name__}")
