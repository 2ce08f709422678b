"""Reads images of bands: PNG of 16 bits, NPY and NPZ here, TIFF and DICOM in modules of their own."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.user_files import EACH_IMAGE
from mae_vit.data.images.bands.dicom import is_dicom, open_dicom
from mae_vit.data.images.bands.tiff import is_tiff, open_tiff
from mae_vit.data.images.bounds import MAX_BANDS, DecodeError, Raster, check_shape, checked_dtype, first_line

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Encoders write chunks of 8 KiB and more. A hostile file may have any number of tiny chunks.
_MAX_PNG_CHUNKS = 1 << 20
_DEPTH_AT, _COLOR_AT = 24, 25
_GRAY, _RGB, _GRAY_ALPHA, _RGB_ALPHA = 0, 2, 4, 6
NPY_MAGIC = b"\x93NUMPY"
NPZ_MAGIC = b"PK\x03\x04"
ARRAY_MAGIC = (NPY_MAGIC, NPZ_MAGIC)
# NumPy's own bound on headers, which it evaluates as a literal. An image's header has about 80.
_MAX_HEADER = 10_000
_MEMBERS = 64  # of a NPZ file that names its image
_ROWS = 64  # of an array, to compare


def open_raster(data: bytes, *, every_band: bool = False, count: int | None = None) -> Raster | None:
    """Decodes an image other than a photograph of 8 bits.

    With `every_band`, it decodes TIFF files of 8 bits too, with their bands of transparency. `count` is the number of
    bands, if it is known: it says which axis of an array is theirs.

    Returns:
        The image; None if `mae_vit.data.images.decode` is to decode it.

    Raises:
        DecodeError: for anything truncated, damaged, too large or not taken; with the reason.
        InputError: if a package is missing.
    """
    if data.startswith(NPY_MAGIC):
        return _open_npy(data, count)
    if data.startswith(PNG_MAGIC):
        deep = len(data) > _COLOR_AT and data[_DEPTH_AT] == 16
        return _open_png(data) if deep else None
    if is_tiff(data):
        return open_tiff(data, every_band=every_band)
    if data.startswith(NPZ_MAGIC):
        return _open_npz(data, count)
    if is_dicom(data):
        return open_dicom(data)
    return None


def open_bands(data: bytes, bands: Bands) -> Raster:
    """Decodes an image of the bands that a data set has.

    What `prepare` wrote is NPY; shards of others, prepared in place, may hold any format.

    Raises:
        DecodeError: for anything damaged, too large, or of other bands.
    """
    count = len(bands.names)
    raster = open_raster(data, count=count)
    if raster is None or (len(raster.pixels) != count and raster.extension == "tiff"):
        # Prepared in place with options of bands, which take bands of transparency too.
        raster = open_raster(data, every_band=True)
    if raster is None:
        raise DecodeError(f"no image of {count} bands of {bands.dtype}")
    check_kind(raster.pixels, bands)
    return raster


def check_kind(pixels: np.ndarray, bands: Bands) -> None:
    """Checks that an image (C, H, W) has the bands that a data set has; raises DecodeError naming both kinds."""
    count, dtype = len(pixels), pixels.dtype.name
    if (count, dtype) != (len(bands.names), bands.dtype):
        raise DecodeError(f"{count}x{dtype}, unlike the other images ({len(bands.names)}x{bands.dtype})")


def _open_png(data: bytes) -> Raster:
    """Decodes a PNG of 16 bits: Pillow reads gray, imagecodecs colors and transparency, which is dropped."""
    color = data[_COLOR_AT]
    if len(data) < 33 or data[12:16] != b"IHDR" or color not in (_GRAY, _RGB, _GRAY_ALPHA, _RGB_ALPHA):
        raise DecodeError("its PNG header is damaged")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    count = 3 if color in (_RGB, _RGB_ALPHA) else 1
    check_shape(count, height, width, "uint16")
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
            "PNG files of 16-bit colors need imagecodecs; pip install 'mae-vit[bands]'"
        ) from None
    except Exception as error:  # decoders raise many types on damaged bytes
        raise DecodeError(first_line(error)) from None
    names = ("red", "green", "blue") if count == 3 else ()
    notes = ("transparent, made opaque",) if color in (_GRAY_ALPHA, _RGB_ALPHA) else ()
    return Raster("png", pixels, names, notes=notes)


def check_png(data: bytes) -> None:
    """Verifies the checksums of a PNG's pixels. Pillow does not, so it decodes some damaged files.

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
                raise DecodeError("its pixels do not match their checksum")
        if kind == b"IEND":
            return
        at = end
    raise DecodeError(f"over {_MAX_PNG_CHUNKS:,} chunks")


class _Header(NamedTuple):
    """The header of a NPY file: where the array starts, its axes, and the type in the file's byte order."""

    start: int
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    @property
    def end(self) -> int:
        """Place after the array in the file, in bytes."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def _open_npy(data: bytes, count: int | None, extension: str = "npy") -> Raster:
    """Reads a NPY file: (H, W), (C, H, W) or (H, W, C)."""
    header = _read_header(data, count)
    if len(data) < header.end:
        raise DecodeError("its array is truncated")
    flat = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start)
    array = flat.reshape(header.shape, order="F" if header.fortran else "C")
    if len(array) != count and (side := _side_in_stack(array)):
        single = (1, *header.shape) if array.ndim == 2 else (side, side, len(array))
        fits = array.ndim == 2 or len(array) <= MAX_BANDS
        alone = f" (or, if it is a single image, write it as {single})" if fits else ""
        raise DecodeError(
            f"its array is a stack of {len(array)} images of {side}x{side} px; {EACH_IMAGE}{alone}"
        )
    if array.ndim == 2:
        array = array[None]
    elif _bands_last(header.shape, count):
        array = array.transpose(2, 0, 1)
    return Raster(extension, array.astype(header.dtype.newbyteorder("="), copy=False))


def _bands_last(shape: tuple[int, ...], count: int | None) -> bool:
    """Whether the last of three axes is that of the bands, as after two equal sides or a longer first axis.

    What `prepare` wrote, with the bands first, may look so as well: there, `count` decides.
    """
    first, second, last = shape
    return first != count and (last == count or first == second != last or first > last)


def _side_in_stack(array: np.ndarray) -> int:
    """Returns K of a stack of N images, (N, K, K) or flat (N, K * K); 0 of an image.

    In an image the next row is more like a row than pixels K further in it. In a flat stack it is another image.
    """
    count, width, side = len(array), array.shape[-1], math.isqrt(array.shape[-1])
    if array.ndim == 3:
        return width if count > width == array.shape[1] else 0
    if side * side != width or side < 16 or count in (1, width):
        return 0
    rows = array[:_ROWS].astype(np.float64)
    further, next_row = np.abs(rows[:, side:] - rows[:, :-side]).mean(), np.abs(np.diff(rows, axis=0)).mean()
    return side if further < next_row * 0.9 else 0


def _open_npz(data: bytes, count: int | None) -> Raster:
    """Reads a NPZ file of one array, or of several with one named "image"."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.namelist()
            arrays = [name for name in members if name.endswith(".npy")]
            if len(arrays) > 1:
                arrays = [name for name in arrays if name == "image.npy"]
            if len(arrays) != 1 or len(members) > _MEMBERS:
                raise DecodeError(
                    f'{len(members)} arrays in one file; name the image "image", or for stacks {EACH_IMAGE}'
                )
            with archive.open(arrays[0]) as file:
                start = file.read(_MAX_HEADER + 12)
                # The header bounds what is unpacked.
                inner = start + file.read(max(0, _read_header(start, count).end - len(start)))
    except DecodeError:
        raise
    except Exception as error:  # damaged, encrypted, of an unknown compression: many types
        raise DecodeError(f"the NPZ file is damaged: {first_line(error)}") from None
    return _open_npy(inner, count, "npz")


def _read_header(data: bytes, bands: int | None) -> _Header:
    """Reads the header at the beginning of `data`, and checks the size that it declares."""
    if len(data) < 10 or data[:6] != NPY_MAGIC:
        raise DecodeError("no NPY header")
    version, at = data[6], 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:at], "little")
    if version not in (1, 2) or length > _MAX_HEADER or len(data) < at + length:
        raise DecodeError("its NPY header is damaged")
    header = _parse(data[: at + length])
    count, height, width = (1, *header.shape)[-3:]
    if len(header.shape) == 3 and _bands_last(header.shape, bands):
        count, height, width = width, count, height
    check_shape(count, height, width, header.dtype.name)
    return header


@lru_cache(maxsize=64)  # the files of a data set have one header
def _parse(header: bytes) -> _Header:
    stream = io.BytesIO(header)
    read = np.lib.format.read_array_header_1_0 if header[6] == 1 else np.lib.format.read_array_header_2_0
    try:
        np.lib.format.read_magic(stream)
        shape, fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    except Exception:  # NumPy evaluates the header as a literal, which raises many types
        raise DecodeError("its NPY header is damaged") from None
    if dtype.hasobject:
        raise DecodeError("its array contains Python objects, which are never loaded")
    checked_dtype(dtype.name)
    if len(shape) not in (2, 3):
        raise DecodeError(
            f"its array has {len(shape)} axes, but an image has (H, W), (C, H, W) or (H, W, C); write each image "
            "of a stack to its own file"
        )
    return _Header(len(header), shape, fortran, dtype)
