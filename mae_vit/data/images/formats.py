"""Which files are images."""

from __future__ import annotations


def is_image(path: str) -> bool:
    """Whether a path looks like an image's, and neither it nor a folder on it is hidden."""
    # Plain string methods: pathlib's take most of the time that a listing takes.
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return bool(dot) and extension.lower() in IMAGE_EXTENSIONS and not f"/{path}".count("/.")


IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
