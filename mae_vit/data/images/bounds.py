"""Bounds on images, the error for bytes that are not an image, and an image of bands as its file holds it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mae_vit.core.bands import DTYPES

# The command line takes bounds from here, and --help must be fast.
if TYPE_CHECKING:
    import numpy as np

# Pillow's bound against decompression bombs. It holds for all decoders: a header may state any size.
MAX_PIXELS = 178_956_970
# The size of MAX_PIXELS pixels without compression. No image needs more.
MAX_IMAGE_BYTES = 3 * MAX_PIXELS + (1 << 20)
# Hyperspectral sensors have 200 to 500 bands. More pages than this are a film or a volume.
MAX_BANDS = 512


class DecodeError(ValueError):
    """The bytes are not a complete image; the message gives the reason."""


def check_bytes(count: int) -> None:
    """Checks an encoded image's size in bytes, before it is read.

    Raises:
        DecodeError: if `count` is over `MAX_IMAGE_BYTES`.
    """
    if count > MAX_IMAGE_BYTES:
        raise DecodeError(f"{count} bytes are too large for an image")


def first_line(error: Exception) -> str:
    """Returns the first line of a decoder's error, or its type if it has no text."""
    text = ""
    with suppress(Exception):  # pydicom's errors of damaged text fail to print
        text = str(error)
    return (text.splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Raster:
    """An image other than a photograph of 8 bits.

    Attributes:
        extension: extension of its format, determined from the bytes.
        pixels: (C, H, W) of one of `mae_vit.core.bands.DTYPES`. The memory may be shared with the file's bytes.
        names: names of the bands; empty if the file names none.
        nodata: raw value of missing pixels that the file states.
        notes: what decoding changes beyond decompression.
    """

    extension: str
    pixels: np.ndarray
    names: tuple[str, ...] = ()
    nodata: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Bands and type, as `prepare --take` takes it: "13xuint16"."""
        return f"{len(self.pixels)}x{self.pixels.dtype.name}"


def checked_dtype(name: str) -> str:
    """Returns the name of a type that is taken; raises DecodeError for other types."""
    if name not in DTYPES:
        raise DecodeError(f"its values are {name}; only {', '.join(DTYPES)} can be read")
    return name


def check_shape(count: int, height: int, width: int, dtype: str) -> None:
    """Checks a declared size before memory is taken for it.

    Raises:
        DecodeError: if the image has no pixels, too many, or too many bands.
    """
    if min(count, height, width) < 1:
        raise DecodeError(f"its header says {count} bands of {width}x{height} pixels")
    if count > MAX_BANDS:
        raise DecodeError(f"{count} bands or pages; the limit is {MAX_BANDS}")
    if height * width > MAX_PIXELS:
        raise DecodeError(f"{width}x{height} pixels exceed the limit of {MAX_PIXELS}")
    size = count * height * width * int("".join(filter(str.isdigit, dtype))) // 8
    if size > 3 * MAX_PIXELS:
        raise DecodeError(
            f"{width}x{height} pixels of {count} bands of {dtype} have {size} bytes, more than the limit of "
            f"{3 * MAX_PIXELS}; cut it into tiles"
        )
