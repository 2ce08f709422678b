"""Preprocesses images: `prepare` does it before it stores them, and inference repeats it.

Both call the same functions with the same record, `mae_vit.core.preprocessing.Preprocessing`. So a network gets the
same pixels from a user's file as training read from the shards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import numpy as np
from PIL import ExifTags, Image, ImageOps

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.messages import nearest
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.data.images.bands.dicom import is_dicom
from mae_vit.data.images.bands.read import check_kind, open_bands, open_raster
from mae_vit.data.images.bounds import DecodeError, Raster
from mae_vit.data.images.decode import Header, decode, header_of, pillow_image, pixels_of, read_header

DEFAULT_QUALITY = 90
_LOSSLESS = ("png", "bmp", "gif", "tiff", "ppm")
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def preprocess(data: bytes, channels: int, how: Preprocessing = UNCHANGED, bands: Bands = RGB8) -> np.ndarray:
    """Decodes a user's image to the pixels that training would have read from the shards of `bands`.

    Returns:
        uint8 (C, H, W), or raw values of the type of `bands`.

    Raises:
        DecodeError: for anything damaged, too large, unknown, or of other bands.
        InputError: if a package is missing.
    """
    if not bands.photographs:
        raster = open_raster(data, every_band=True) if how.bands else None
        pixels, _ = take_bands(raster or open_bands(data, bands), how, bands.nodata)
        check_kind(pixels, bands)
        return pixels
    if is_dicom(data):
        raster = open_raster(data)
        data = data if raster is None else as_photograph(raster) or data
    if how != UNCHANGED and changes(header := read_header(data), how):
        data, _ = encode_anew(decode(data, 1 if header.gray else 3), header, how)
    return decode(data, channels)


def preprocess_opened(image: Image.Image, channels: int, how: Preprocessing) -> np.ndarray:
    """Preprocesses a photograph that Pillow opened or made from an array: uint8 (C, H, W).

    Raises:
        DecodeError: if its pixels have no known range, or cannot be encoded.
    """
    header = header_of(image)
    if not changes(header, how):
        return pixels_of(image, channels)
    stored, _ = encode_anew(pixels_of(image, 1 if header.gray else 3), header, how)
    return decode(stored, channels)


def changes(header: Header, how: Preprocessing) -> bool:
    """Whether preprocessing turns or shrinks a photograph."""
    turned = how.exif_orientation == "apply" and header.orientation != 1
    return turned or (how.resize is not None and min(header.height, header.width) > how.resize)


def encode_anew(pixels: np.ndarray, header: Header, how: Preprocessing) -> tuple[bytes, str]:
    """Resizes and turns a photograph (C, H, W). Returns its bytes and their extension.

    The result is PNG if the image is only turned and was lossless, else JPEG.

    Raises:
        DecodeError: if the result cannot be encoded.
    """
    image, shrunk = pillow_image(pixels), False
    if how.resize is not None and (shrunk := min(header.height, header.width) > how.resize):
        height, width = _smaller(pixels.shape[1:], how.resize)
        # Pillow's bicubic is antialiased, and gives the same pixels on every machine.
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    if how.exif_orientation == "apply":
        image.getexif()[ExifTags.Base.Orientation] = header.orientation
        image = ImageOps.exif_transpose(image)
    extension = "png" if header.extension in _LOSSLESS and not shrunk else "jpg"
    stream = io.BytesIO()
    try:
        if extension == "png":
            image.save(stream, "png")
        else:
            image.save(stream, "jpeg", quality=how.quality or DEFAULT_QUALITY)
    except (OSError, ValueError) as error:
        raise DecodeError(f"{image.width}x{image.height} pixels cannot be encoded ({error})") from None
    return stream.getvalue(), extension


def as_photograph(raster: Raster) -> bytes | None:
    """Encodes a DICOM image of 8-bit gray or RGB as PNG, to be treated as a photograph; None for other images."""
    if raster.extension != "dcm" or raster.pixels.dtype != np.uint8 or len(raster.pixels) not in (1, 3):
        return None
    stream = io.BytesIO()
    pillow_image(raster.pixels).save(stream, "png")
    return stream.getvalue()


def _smaller(size: Sequence[int], resize: int) -> tuple[int, int]:
    scale = resize / min(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def take_bands(
    raster: Raster, how: Preprocessing, nodata: float | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Chooses bands of an image, clips its values and resizes it.

    Returns:
        Raw values (C, H, W), and the names of the bands, or their numbers where the file names none.

    Raises:
        DecodeError: if it lacks a band, or has infinite values.
    """
    pixels = raster.pixels
    names = raster.names or tuple(f"band {number}" for number in range(1, len(pixels) + 1))
    if how.bands:
        places = _chosen(how.bands, names, named=bool(raster.names))
        pixels, names = pixels[places], tuple(names[n] for n in places)
    for name, band in zip(names, pixels, strict=True):
        if pixels.dtype.kind == "f" and np.isinf(band).any():
            raise DecodeError(f'infinite values in band "{name}"; write NaN where a value is missing')
    return shape_bands(pixels, how, nodata), names


def shape_bands(pixels: np.ndarray, how: Preprocessing, nodata: float | None) -> np.ndarray:
    """Clips and resizes raw values (C, H, W) of the stored bands, if `how` says so."""
    if how.window is not None:
        pixels = _clipped(pixels, how.window, nodata)
    if how.resize is not None and min(pixels.shape[1:]) > how.resize:
        # It imports torch, which takes most of the start-up time of a decoding process.
        from mae_vit.data.images.bands.resize import resize_bands

        pixels = resize_bands(pixels, _smaller(pixels.shape[1:], how.resize), nodata)
    return pixels


def _chosen(select: Sequence[str], names: Sequence[str], *, named: bool) -> list[int]:
    """Returns the places of the selected bands among an image's bands; `named` says that its file names them."""
    places, count = list[int](), len(names)
    for part in select:
        if part in names:
            places.append(names.index(part))
            continue
        if not (numbers := _RANGE.fullmatch(part)):
            known = f"; {nearest(part, names)}" if named else f", and its {count} bands have no names"
            raise DecodeError(f'it has no band "{part}"{known}')
        first, last = int(numbers[1]), int(numbers[2] or numbers[1])
        if not 1 <= first <= last <= count:
            raise DecodeError(f"it has bands 1 to {count}, not {part}")
        places += range(first - 1, last)
    if len(set(places)) < len(places):
        raise DecodeError(f"--bands {','.join(select)} has a band twice; give each once")
    return places


def _clipped(pixels: np.ndarray, window: tuple[float, float], nodata: float | None) -> np.ndarray:
    low, high = window
    step = float(abs(np.spacing(pixels.dtype.type(nodata or 0)))) if pixels.dtype.kind == "f" else 1
    if pixels.dtype.kind != "f":
        limits = np.iinfo(pixels.dtype)
        low, high = max(np.ceil(low), limits.min), min(np.floor(high), limits.max)
        if low >= high:
            raise DecodeError(f"--window contains no values of {pixels.dtype.name}; give a wider one")
    # A value that is clipped does not become a missing one.
    low, high = low + step * (low == nodata), high - step * (high == nodata)
    clipped = np.clip(pixels, pixels.dtype.type(low), pixels.dtype.type(high))
    return clipped if nodata is None else np.where(pixels == pixels.dtype.type(nodata), pixels, clipped)
