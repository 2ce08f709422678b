"""PNG files: their checksums, and all 16 bits of deep ones."""

from __future__ import annotations

import io
import warnings
import zlib

import numpy as np
from PIL import Image

from mae_vit.core.errors import InputError
from mae_vit.data.images.bounds import DecodeError, Raster, check_shape, first_line

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Encoders write chunks of 8 KiB and more. A hostile file may have any number of tiny chunks.
_MAX_PNG_CHUNKS = 1 << 20
_DEPTH_AT, _COLOR_AT = 24, 25
_GRAY, _RGB, _GRAY_ALPHA, _RGB_ALPHA = 0, 2, 4, 6


def is_deep(data: bytes) -> bool:
    """Whether the bytes of a PNG declare 16 bits."""
    return len(data) > _COLOR_AT and data[_DEPTH_AT] == 16


def open_png(data: bytes, max_pixels: int | None) -> Raster:
    """Decodes a PNG of 16 bits: Pillow reads gray, imagecodecs colors and transparency, which is dropped.

    Raises:
        DecodeError: if it is damaged or too large.
        InputError: if imagecodecs is needed and missing.
    """
    color = data[_COLOR_AT]
    if len(data) < 33 or data[12:16] != b"IHDR" or color not in (_GRAY, _RGB, _GRAY_ALPHA, _RGB_ALPHA):
        raise DecodeError("its PNG header is damaged")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    count = 3 if color in (_RGB, _RGB_ALPHA) else 1
    check_shape(count, height, width, "uint16", max_pixels)
    check_png(data)
    try:
        if color == _GRAY:
            with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=("PNG",)) as image:
                warnings.simplefilter("ignore")
                pixels = np.asarray(image).astype(np.uint16)[None]
        else:
            import imagecodecs  # Pillow reads the upper 8 of their 16 bits alone

            pixels = np.asarray(imagecodecs.png_decode(data)).transpose(2, 0, 1)[:count]
    except ImportError:
        raise InputError(
            "PNG files of 16-bit colors need imagecodecs: pip install 'mae-vit[bands]'"
        ) from None
    except Exception as error:  # decoders raise many types on damaged bytes
        raise DecodeError(first_line(error)) from None
    names = ("red", "green", "blue") if count == 3 else ()
    notes = ("transparent, made opaque",) if color in (_GRAY_ALPHA, _RGB_ALPHA) else ()
    return Raster("png", pixels, names, notes=notes)


def check_png(data: bytes) -> None:
    """Verifies the checksums of a PNG's pixels. Pillow does not, so it decodes some damaged files.

    Other formats have no checksums.

    Raises:
        DecodeError: if one differs.
    """
    at = len(PNG_MAGIC)
    for _ in range(_MAX_PNG_CHUNKS):
        if at + 12 > len(data):
            return  # chunks are missing; Pillow raises for that
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + length
        if kind == b"IDAT" and end <= len(data):
            checksum = int.from_bytes(data[end - 4 : end], "big")
            if zlib.crc32(memoryview(data)[at + 4 : end - 4]) != checksum:
                raise DecodeError("the checksum of its pixels differs")
        if kind == b"IEND":
            return
        at = end
    raise DecodeError(f"over {_MAX_PNG_CHUNKS:,} chunks")
