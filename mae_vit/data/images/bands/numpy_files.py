"""Reads NPY and NPZ files. Pickled objects are never loaded."""

from __future__ import annotations

import io
import math
import zipfile
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mae_vit.core.user_files import EACH_IMAGE
from mae_vit.data.images.bounds import DecodeError, Raster, check_shape, checked_dtype, first_line

NPY_MAGIC = b"\x93NUMPY"
NPZ_MAGIC = b"PK\x03\x04"
ARRAY_MAGIC = (NPY_MAGIC, NPZ_MAGIC)
# NumPy's own bound on headers, which it evaluates as a literal. An image's header has about 80.
_MAX_HEADER = 10_000
_MEMBERS = 64  # of a NPZ file that names its image
# A side of an image that is so many times the other may be a number of images.
_LONG = 8
_ROWS = 64


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


def open_npy(data: bytes, max_pixels: int | None, extension: str = "npy") -> Raster:
    """Reads a NPY file: (H, W), (C, H, W) or (H, W, C); the shorter outer axis is that of the bands.

    Raises:
        DecodeError: if it is damaged, holds objects, or is no image.
    """
    header = _read_header(data, max_pixels)
    if len(data) < header.end:
        raise DecodeError("its array is truncated")
    flat = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start)
    array = flat.reshape(header.shape, order="F" if header.fortran else "C")
    if side := _side_in_stack(array):
        raise DecodeError(f"its array is a stack of {len(array)} images of {side}x{side} px: {EACH_IMAGE}")
    if array.ndim == 2:
        array = array[None]
    elif array.shape[0] > array.shape[-1]:
        array = array.transpose(2, 0, 1)
    return Raster(extension, array.astype(header.dtype.newbyteorder("="), copy=False))


def _side_in_stack(array: np.ndarray) -> int:
    """Returns K of a stack of N images, (N, K, K) or flat (N, K * K); 0 of an image.

    The pixel below another one is more like it than one in the same row and far away. In a flat stack it belongs to
    another image, and the one K further in the row lies below.
    """
    count, width, side = len(array), array.shape[-1], math.isqrt(array.shape[-1])
    if array.ndim == 3:
        return width if count > width == array.shape[1] else 0
    if side * side != width or side < 16 or count in (1, width):
        return 0
    rows = array[:_ROWS].astype(np.float64)
    below, next_row = np.abs(rows[:, side:] - rows[:, :-side]).mean(), np.abs(np.diff(rows, axis=0)).mean()
    long = max(count, width) >= _LONG * min(count, width)
    return side if below < next_row * (2 if long else 0.9) else 0


def open_npz(data: bytes, max_pixels: int | None) -> Raster:
    """Reads a NPZ file of one array, or of several with one named "image".

    Raises:
        DecodeError: if it is damaged, or does not say which array is the image.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.namelist()
            arrays = [name for name in members if name.endswith(".npy")]
            if len(arrays) > 1:
                arrays = [name for name in arrays if name == "image.npy"]
            if len(arrays) != 1 or len(members) > _MEMBERS:
                raise DecodeError(
                    f'{len(members)} arrays in one file: name the image "image"; of stacks {EACH_IMAGE}'
                )
            with archive.open(arrays[0]) as file:
                start = file.read(_MAX_HEADER + 12)
                # The header bounds what is unpacked.
                inner = start + file.read(max(0, _read_header(start, max_pixels).end - len(start)))
    except DecodeError:
        raise
    except Exception as error:  # damaged, encrypted, of an unknown compression: many types
        raise DecodeError(f"the NPZ file is damaged: {first_line(error)}") from None
    return open_npy(inner, max_pixels, "npz")


def _read_header(data: bytes, max_pixels: int | None) -> _Header:
    """Reads the header at the beginning of `data`, and checks the size that it declares."""
    if len(data) < 10 or data[:6] != NPY_MAGIC:
        raise DecodeError("no NPY header")
    version, at = data[6], 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:at], "little")
    if version not in (1, 2) or length > _MAX_HEADER or len(data) < at + length:
        raise DecodeError("its NPY header is damaged")
    header = _parse(data[: at + length])
    count, height, width = header.shape if len(header.shape) == 3 else (1, *header.shape)
    if count > width:
        count, height, width = width, count, height
    check_shape(count, height, width, header.dtype.name, max_pixels)
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
        raise DecodeError("its array holds Python objects, which are never loaded")
    checked_dtype(dtype.name)
    if len(shape) not in (2, 3):
        raise DecodeError(
            f"its array has {len(shape)} axes: an image has (H, W), (C, H, W) or (H, W, C); write each "
            "of a stack as a file"
        )
    return _Header(len(header), shape, fortran, dtype)
