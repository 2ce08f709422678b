"""Bytes to pixels: simplejpeg where it can, Pillow for what it refuses."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image

# Pillow's own bound against decompression bombs, held for both decoders: a header
# may promise any size.
MAX_PIXELS = 178_956_970
_JPEG_MAGIC = b"\xff\xd8\xff"


class DecodeError(ValueError):
    """Bytes that are no whole image; the message says why, in short."""


def decode(data: bytes, channels: int) -> np.ndarray:
    """Decodes an image; of an animation, the first frame.

    EXIF orientation is not applied: neither the official MAE code nor torchvision's
    ImageFolder does, and a view must not depend on the decoder.

    Args:
        data: an encoded image; its format is told from the bytes, not from a name.
        channels: 1 for grey, 3 for RGB; other color modes are converted.

    Returns:
        uint8 (C, H, W), contiguous; 16-bit greys are scaled to 8 bits.

    Raises:
        DecodeError: for anything truncated, damaged, too large or unknown.
    """
    if data.startswith(_JPEG_MAGIC):
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            # CMYK goes to Pillow, whose conversion others compare with.
            if height * width <= MAX_PIXELS and colorspace != "CMYK":
                # strict: libjpeg fills truncated images with grey silently.
                pixels = simplejpeg.decode_jpeg(
                    data, colorspace="GRAY" if channels == 1 else "RGB", strict=True
                )
                return np.ascontiguousarray(pixels.transpose(2, 0, 1))
        except ValueError:
            pass  # refused, or damaged: Pillow decides which
    return _decode_with_pillow(data, channels)


def image_size(data: bytes) -> tuple[int, int]:
    """Reads (height, width) from the header.

    Raises:
        DecodeError: if there is none.
    """
    if data.startswith(_JPEG_MAGIC):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            return int(height), int(width)
        except ValueError:
            pass
    with _pillow_errors(), Image.open(io.BytesIO(data)) as image:
        return image.height, image.width


def is_grey(data: bytes) -> bool:
    """Tells from the header whether an image has one channel.

    Raises:
        DecodeError: if there is no header.
    """
    if data.startswith(_JPEG_MAGIC):
        try:
            return bool(simplejpeg.decode_jpeg_header(data)[2] == "Gray")
        except ValueError:
            pass
    with _pillow_errors(), Image.open(io.BytesIO(data)) as image:
        return image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16")


def _decode_with_pillow(data: bytes, channels: int) -> np.ndarray:
    with _pillow_errors(), Image.open(io.BytesIO(data)) as image:
        if image.width * image.height > MAX_PIXELS:
            raise DecodeError(f"{image.width}x{image.height} pixels are over the bound of {MAX_PIXELS}")
        image.load()
        if image.mode.startswith("I"):
            grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
            return np.repeat(grey[None], channels, axis=0)
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


@contextmanager
def _pillow_errors() -> Iterator[None]:
    """Turns whatever Pillow's parsers raise on damaged bytes into a DecodeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except DecodeError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise DecodeError("not an image" if "cannot identify" in lines[0] else lines[0]) from None
