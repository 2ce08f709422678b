"""Which files are images."""

from __future__ import annotations


def is_image(path: str) -> bool:
    """Returns whether a path has an image's extension, and neither the file nor a folder of the path is hidden."""
    # String methods, because pathlib would take most of the time of a listing.
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return bool(dot) and extension.lower() in IMAGE_EXTENSIONS and not f"/{path}".count("/.")


IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
