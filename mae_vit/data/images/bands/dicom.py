"""Reads DICOM files by pydicom: stored values become units (slope and intercept), frames become bands."""

from __future__ import annotations

import io
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.data.images.bands.raster import Raster, check_shape, checked_dtype
from mae_vit.data.images.bounds import DecodeError

# Implicit and explicit little endian, explicit big endian, RLE: what pydicom decodes with bounded memory.
_TAKEN = {
    "1.2.840.10008.1.2",
    "1.2.840.10008.1.2.1",
    "1.2.840.10008.1.2.2",
    "1.2.840.10008.1.2.5",
}
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_META_WITHIN = 4096
_GRAY = ("MONOCHROME1", "MONOCHROME2")
_INT16 = np.iinfo(np.int16)


def is_dicom(data: bytes) -> bool:
    """Whether bytes begin as DICOM files do."""
    return data[128:132] == b"DICM"


def open_dicom(data: bytes, max_pixels: int | None) -> Raster:
    """Reads a DICOM file.

    Values without slope and intercept keep their type. Whole numbers in other units, such as Hounsfield units,
    become int16 where they fit; others become float32. MONOCHROME1 is inverted, so that larger is brighter.

    Raises:
        DecodeError: if it is damaged, too large, compressed, or holds no image.
        InputError: if pydicom is missing.
    """
    try:
        import pydicom
    except ImportError:
        raise InputError("DICOM files need pydicom: pip install 'mae-vit[dicom]'") from None
    if _DEFLATED in data[:_META_WITHIN]:
        raise DecodeError("a deflated DICOM file is not taken: unpack it first (dcmconv +te)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = pydicom.dcmread(io.BytesIO(data))
            return _open(dataset, max_pixels)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # pydicom raises many types on damaged bytes
        raise DecodeError(f"the DICOM file is damaged: {_reason(error)}") from None


def _open(dataset: Any, max_pixels: int | None) -> Raster:
    if "PixelData" not in dataset:
        raise DecodeError("the DICOM file holds no image")
    syntax = str(dataset.file_meta.TransferSyntaxUID)
    if syntax not in _TAKEN:
        name = getattr(dataset.file_meta.TransferSyntaxUID, "name", syntax)
        raise DecodeError(f"DICOM compressed by {name}: decompress it first (gdcmconv --raw, dcmdjpeg)")
    height, width = int(dataset.Rows), int(dataset.Columns)
    frames, samples = int(dataset.get("NumberOfFrames", 1) or 1), int(dataset.get("SamplesPerPixel", 1))
    bits, color = int(dataset.BitsAllocated), str(dataset.PhotometricInterpretation)
    if samples > 1 and (frames > 1 or bits != 8 or samples != 3 or color != "RGB"):
        raise DecodeError(
            f"{frames} frames of {samples} samples ({color}, {bits} bits): one frame of RGB is taken"
        )
    if samples == 1 and color not in _GRAY:
        raise DecodeError(f"DICOM of {color} is not taken: MONOCHROME1, MONOCHROME2, RGB are")
    if bits not in (8, 16):
        raise DecodeError(f"DICOM of {bits} bits is not taken: 8 and 16 are")
    stored = f"{'int' if dataset.get('PixelRepresentation', 0) else 'uint'}{bits}"
    # The widest that it may become.
    check_shape(frames * samples, height, width, "float32", max_pixels)
    values = dataset.pixel_array
    if samples == 3:
        values = values.reshape(height, width, 3).transpose(2, 0, 1)
        return _raster(np.ascontiguousarray(values), ("red", "green", "blue"), ())
    values = values.reshape(frames, height, width).astype(stored, copy=False)
    notes = []
    if color == "MONOCHROME1":
        notes.append("MONOCHROME1, inverted")
        depth = int(dataset.get("BitsStored", bits))
        values = (-1 - values) if stored.startswith("int") else ((1 << depth) - 1) - values
        values = values.astype(stored)
    values, rescaled = _in_units(values, dataset)
    return _raster(values, (), (*notes, *rescaled))


def _in_units(values: np.ndarray, dataset: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Applies slope and intercept, where they change anything."""
    slope, intercept = (
        float(dataset.get("RescaleSlope", 1) or 1),
        float(dataset.get("RescaleIntercept", 0) or 0),
    )
    if not (np.isfinite(slope) and np.isfinite(intercept)):
        raise DecodeError("its RescaleSlope or RescaleIntercept is no number")
    if slope == 1 and intercept == 0:
        # Signed bytes are rare, and have no type of their own here.
        return (values.astype(np.int16) if values.dtype == np.int8 else values), ()
    note = ("in units of RescaleSlope and RescaleIntercept",)
    if slope.is_integer() and intercept.is_integer():
        low, high = (int(v) * int(slope) + int(intercept) for v in (values.min(), values.max()))
        if _INT16.min <= min(low, high) and max(low, high) <= _INT16.max:
            return (values.astype(np.int64) * int(slope) + int(intercept)).astype(np.int16), note
    return (values * slope + intercept).astype(np.float32), note


def _raster(values: np.ndarray, names: tuple[str, ...], notes: tuple[str, ...]) -> Raster:
    count, height, width = values.shape
    dtype = checked_dtype(values.dtype.name)
    return Raster("dcm", height, width, count, dtype, lambda: values, names, notes=notes)


def _reason(error: Exception) -> str:
    text = ""
    with suppress(Exception):
        text = str(error)
    return (text.splitlines() or [type(error).__name__])[0]
