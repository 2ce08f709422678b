"""Which files are images."""

from __future__ import annotations

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
# Images only where no other kind is beside them: of photographs these are features, masks or metadata.
ARRAY_EXTENSIONS = ("npy", "npz", "dcm", "dicom")
_ALL = frozenset((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))


def is_image(path: str) -> bool:
    """Returns whether a path has an image's extension, and neither the file nor a folder of the path is hidden."""
    # String methods, because pathlib would take most of the time of a listing.
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return bool(dot) and extension.lower() in _ALL and not f"/{path}".count("/.")


def is_array(path: str) -> bool:
    """Returns whether a path has an extension of `ARRAY_EXTENSIONS`."""
    return path.rpartition(".")[2].lower() in ARRAY_EXTENSIONS
