"""Bounds on the size of an image, and the error for bytes that are not an image."""

from __future__ import annotations

from contextlib import suppress

# Pillow's bound against decompression bombs. It holds for all decoders: a header may state any size.
MAX_PIXELS = 178_956_970
# The size of MAX_PIXELS pixels without compression. No image needs more.
MAX_IMAGE_BYTES = 3 * MAX_PIXELS + (1 << 20)


class DecodeError(ValueError):
    """The bytes are not a complete image; the message gives the reason."""


def check_bytes(count: int) -> None:
    """Checks an encoded image's size in bytes, before it is read.

    Raises:
        DecodeError: if `count` is over `MAX_IMAGE_BYTES`.
    """
    if count > MAX_IMAGE_BYTES:
        raise DecodeError(f"{count} bytes: no image is so large")


def first_line(error: Exception) -> str:
    """Returns the first line of a decoder's error, or its type if it has no text."""
    text = ""
    with suppress(Exception):  # pydicom's errors of damaged text fail to print
        text = str(error)
    return (text.splitlines() or [type(error).__name__])[0]
