"""Which files are images."""

from __future__ import annotations

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
# Images only where no other kind is beside them: of photographs these are features, masks or metadata.
ARRAY_EXTENSIONS = ("npy", "npz", "dcm", "dicom")
# What phones and cameras write, and Pillow does not read.
_UNREAD_EXTENSIONS = ("heic", "heif", "jxl", "cr2", "cr3", "nef", "arw", "dng", "orf", "raf", "rw2")
_ALL = frozenset((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))


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
