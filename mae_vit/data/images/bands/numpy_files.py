"""Reads NPY and NPZ files. Pickled objects are never loaded."""

from __future__ import annotations

import io
import zipfile
import zlib
from functools import lru_cache
from typing import Literal

import numpy as np

from mae_vit.core.user_files import EACH_IMAGE
from mae_vit.data.images.bands.raster import Raster, check_shape, checked_dtype
from mae_vit.data.images.bounds import DecodeError

NPY_MAGIC = b"\x93NUMPY"
NPZ_MAGIC = b"PK\x03\x04"
ARRAY_MAGIC = (NPY_MAGIC, NPZ_MAGIC)
# NumPy's own bound on headers, which it evaluates as a literal. An image's header has about 80.
_MAX_HEADER = 10_000
Order = Literal["C", "F"]
_MEMBERS = 64  # of a NPZ file that names its image


def open_npy(data: bytes, max_pixels: int | None, extension: str = "npy") -> Raster:
    """Reads the header of a NPY file: (H, W), (C, H, W) or (H, W, C); the shorter outer axis is that of the bands.

    Raises:
        DecodeError: if it is damaged, holds objects, or is no image.
    """
    start, shape, order, dtype = _header(data)
    count, height, width = _image_shape(shape)
    check_shape(count, height, width, dtype.newbyteorder("=").name, max_pixels)
    if len(data) < start + count * height * width * dtype.itemsize:
        raise DecodeError("its array is truncated")

    def pixels() -> np.ndarray:
        array = np.frombuffer(data, dtype, count * height * width, start).reshape(shape, order=order)
        if len(shape) == 2:
            array = array[None]
        elif shape[0] != count:
            array = array.transpose(2, 0, 1)
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))

    return Raster(extension, height, width, count, dtype.newbyteorder("=").name, pixels)


def open_npz(data: bytes, max_pixels: int | None) -> Raster:
    """Reads a NPZ file of one array, or of several with one named "image".

    Raises:
        DecodeError: if it is damaged, or does not say which array is the image.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            arrays = [member for member in members if member.filename.endswith(".npy")]
            if len(arrays) > 1:
                arrays = [member for member in arrays if member.filename == "image.npy"]
            if len(arrays) != 1 or len(members) > _MEMBERS:
                raise DecodeError(
                    f'{len(members)} arrays in one file: name the image "image"; of stacks {EACH_IMAGE}'
                )
            with archive.open(arrays[0]) as file:
                start = file.read(_MAX_HEADER + 12)
                # The header bounds what is unpacked.
                _check_declared(start, max_pixels)
                size = _declared_bytes(start)
                inner = start + file.read(max(0, size - len(start)))
    except DecodeError:
        raise
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise DecodeError(f"the NPZ file is damaged: {error}") from None
    except Exception as error:  # encrypted or of an unknown compression: several types
        raise DecodeError(f"the NPZ file cannot be read: {error}") from None
    return open_npy(inner, max_pixels, "npz")


def _check_declared(start: bytes, max_pixels: int | None) -> None:
    _, shape, _, dtype = _header(start)
    check_shape(*_image_shape(shape), dtype.name, max_pixels)


def _declared_bytes(start: bytes) -> int:
    at, shape, _, dtype = _header(start)
    count, height, width = _image_shape(shape)
    return at + count * height * width * dtype.itemsize


def _header(data: bytes) -> tuple[int, tuple[int, ...], Order, np.dtype]:
    """Returns where the array begins, its shape, order ("C" or "F") and type."""
    if len(data) < 10 or data[:6] != NPY_MAGIC:
        raise DecodeError("no NPY header")
    version, at = data[6], 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:at], "little")
    if version not in (1, 2) or length > _MAX_HEADER or len(data) < at + length:
        raise DecodeError("its NPY header is damaged")
    shape, order, dtype = _parse(data[: at + length])
    return at + length, shape, order, dtype


@lru_cache(maxsize=64)  # the files of a data set have one header
def _parse(header: bytes) -> tuple[tuple[int, ...], Order, np.dtype]:
    stream = io.BytesIO(header)
    try:
        np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if header[6] == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    except Exception:  # NumPy evaluates the header as a literal, which raises many types
        raise DecodeError("its NPY header is damaged") from None
    if dtype.hasobject:
        raise DecodeError("its array holds Python objects, which are never loaded")
    checked_dtype(dtype.newbyteorder("=").name)
    return shape, "F" if fortran else "C", dtype


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns (C, H, W) of an array's shape."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) != 3:
        raise DecodeError(
            f"its array has {len(shape)} axes: an image has (H, W), (C, H, W) or (H, W, C); write each "
            "of a stack as a file"
        )
    first, second, third = shape
    return (first, second, third) if first <= third else (third, first, second)
