"""Reads DICOM files by pydicom: stored values become units (slope and intercept), frames become bands."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.data.images.bounds import DecodeError, Raster, check_shape, checked_dtype, first_line

# Implicit and explicit little endian, explicit big endian, RLE: what pydicom decodes with bounded memory.
_TAKEN = {"1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.5"}
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_META_WITHIN = 4096
_GRAY = ("MONOCHROME1", "MONOCHROME2")
_FRAME_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_INT16 = np.iinfo(np.int16)


def is_dicom(data: bytes) -> bool:
    """Whether bytes begin as DICOM files do."""
    return data[128:132] == b"DICM"


def open_dicom(data: bytes) -> Raster:
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
        raise DecodeError("a deflated DICOM file; decompress it first (dcmconv +te)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = pydicom.dcmread(io.BytesIO(data))
            _check(dataset)
            if dataset.get("SamplesPerPixel", 1) == 3:
                colors = np.ascontiguousarray(dataset.pixel_array.transpose(2, 0, 1))
                checked_dtype(colors.dtype.name)
                return Raster("dcm", colors, ("red", "green", "blue"))
            return _read_gray(dataset)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # pydicom raises many types on damaged bytes
        raise DecodeError(f"the DICOM file is damaged: {first_line(error)}") from None


def _check(dataset: Any) -> None:
    """Checks what a file declares, before memory is taken for its pixels."""
    if "PixelData" not in dataset:
        raise DecodeError("the DICOM file contains no image")
    syntax = dataset.file_meta.TransferSyntaxUID
    if str(syntax) not in _TAKEN:
        name = getattr(syntax, "name", syntax)
        raise DecodeError(f"DICOM compressed as {name}; decompress it first (gdcmconv --raw, dcmdjpeg)")
    frames, samples = int(dataset.get("NumberOfFrames", 1) or 1), int(dataset.get("SamplesPerPixel", 1))
    bits, color = int(dataset.BitsAllocated), str(dataset.PhotometricInterpretation)
    if samples > 1 and (frames, samples, bits, color) != (1, 3, 8, "RGB"):
        raise DecodeError(
            f"{frames} frames of {samples} samples ({color}, {bits} bits); only one frame of RGB can be read"
        )
    if samples == 1 and color not in _GRAY:
        raise DecodeError(f"DICOM of {color}; only MONOCHROME1, MONOCHROME2 and RGB can be read")
    if bits not in (8, 16):
        raise DecodeError(f"DICOM of {bits} bits; only 8 and 16 can be read")
    # The widest type that its values may become.
    check_shape(frames * samples, int(dataset.Rows), int(dataset.Columns), "float32")


def _read_gray(dataset: Any) -> Raster:
    bits, signed = int(dataset.BitsAllocated), bool(dataset.get("PixelRepresentation", 0))
    stored = np.dtype(f"{'int' if signed else 'uint'}{bits}")
    values = dataset.pixel_array.reshape(-1, dataset.Rows, dataset.Columns).astype(stored, copy=False)
    notes = []
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        notes.append("MONOCHROME1, inverted")
        largest = (1 << int(dataset.get("BitsStored", bits))) - 1
        values = (-1 - values if signed else largest - values).astype(stored)
    # Enhanced files state units for all frames, or for each.
    groups = [group for name in _FRAME_GROUPS for group in dataset.get(name) or ()]
    stated = [item for group in groups for item in group.get("PixelValueTransformationSequence") or ()]
    units = {
        (float(item.get("RescaleSlope", 1) or 1), float(item.get("RescaleIntercept", 0) or 0))
        for item in stated or [dataset]
    }
    if len(units) > 1:
        raise DecodeError("its frames differ in RescaleSlope or RescaleIntercept; write each as an image")
    ((slope, intercept),) = units
    if not (np.isfinite(slope) and np.isfinite(intercept)):
        raise DecodeError("its RescaleSlope or RescaleIntercept is not a number")
    if (slope, intercept) != (1, 0):
        notes.append("in units of RescaleSlope and RescaleIntercept")
        values = _in_units(values, slope, intercept)
    # Signed bytes are rare, and have no type of their own here.
    return Raster("dcm", values.astype(np.int16) if values.dtype == np.int8 else values, notes=tuple(notes))


def _in_units(values: np.ndarray, slope: float, intercept: float) -> np.ndarray:
    if slope.is_integer() and intercept.is_integer():
        low, high = (int(v) * int(slope) + int(intercept) for v in (values.min(), values.max()))
        if _INT16.min <= min(low, high) and max(low, high) <= _INT16.max:
            return (values.astype(np.int64) * int(slope) + int(intercept)).astype(np.int16)
    return (values * slope + intercept).astype(np.float32)
