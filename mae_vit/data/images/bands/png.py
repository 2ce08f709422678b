"""PNG files: their checksums, and all 16 bits of deep ones."""

from __future__ import annotations

import io
import warnings
import zlib

import numpy as np
from PIL import Image

from mae_vit.data.images.bands.raster import Raster, check_shape
from mae_vit.data.images.bounds import DecodeError

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Encoders write chunks of 8 KiB and more. A hostile file may have any number of tiny chunks.
_MAX_PNG_CHUNKS = 1 << 20
_DEPTH_AT, _COLOR_AT = 24, 25
_GRAY, _RGB, _GRAY_ALPHA, _RGB_ALPHA = 0, 2, 4, 6


def is_deep(data: bytes) -> bool:
    """Whether the bytes of a PNG declare 16 bits."""
    return len(data) > _COLOR_AT and data[_DEPTH_AT] == 16


def open_png(data: bytes, max_pixels: int | None) -> Raster:
    """Reads the header of a PNG of 16 bits; transparency is dropped.

    Raises:
        DecodeError: if it is damaged or too large.
    """
    if len(data) < 33 or data[12:16] != b"IHDR" or data[_COLOR_AT] not in (0, 2, 4, 6):
        raise DecodeError("its PNG header is damaged")
    color = data[_COLOR_AT]
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    count = 3 if color in (_RGB, _RGB_ALPHA) else 1
    check_shape(count, height, width, "uint16", max_pixels)
    names = ("red", "green", "blue") if count == 3 else ()
    notes = ("transparent, made opaque",) if color in (_GRAY_ALPHA, _RGB_ALPHA) else ()
    return Raster("png", height, width, count, "uint16", lambda: _decode(data, color), names, notes=notes)


def _decode(data: bytes, color: int) -> np.ndarray:
    check_png(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if color == _GRAY:
                with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
                    return np.asarray(image).astype(np.uint16)[None]
            if color == _GRAY_ALPHA:
                # Two values of 16 bits lie in the file like four of 8, and are filtered alike.
                four = _plane(_as_rgba8(data), None)
                return (four[..., 0].astype(np.uint16) << 8 | four[..., 1])[None]
            mode = "RGB" if color == _RGB else "RGBA"
            # Pillow unpacks one byte of each value: first the upper, then the lower one.
            high, low = _plane(data, f"{mode};16B")[..., :3], _plane(data, f"{mode};16L")[..., :3]
    except Exception as error:  # Pillow raises many types on damaged bytes
        raise DecodeError((str(error).splitlines() or [type(error).__name__])[0]) from None
    return (high.astype(np.uint16) << 8 | low).transpose(2, 0, 1)


def _plane(data: bytes, rawmode: str | None) -> np.ndarray:
    """Decodes by one of Pillow's raw modes; None for its own choice."""
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if rawmode is not None:
            image.tile = [tile._replace(args=rawmode) for tile in image.tile]
        image.load()
        return np.asarray(image)


def _as_rgba8(data: bytes) -> bytes:
    header = b"IHDR" + data[16:24] + bytes((8, _RGB_ALPHA)) + data[26:29]
    return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]


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
