"""Decodes bytes to pixels: simplejpeg decodes what it can, Pillow the rest."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.user_files import ARRAY_EXTENSIONS, HEAD_BYTES, image_kind, what_is
from mae_vit.data.images.bands.dicom import is_dicom
from mae_vit.data.images.bands.read import ARRAY_MAGIC, PNG_MAGIC, check_png, open_bands, open_raster
from mae_vit.data.images.bands.tiff import is_tiff
from mae_vit.data.images.bounds import MAX_PIXELS, DecodeError, first_line

_JPEG_MAGIC = b"\xff\xd8\xff"
# Only Pillow decodes these, as in other codebases: libjpeg and simplejpeg convert them to RGB differently.
_FOUR_INKS = ("CMYK", "YCCK")
_EXIF_MAGIC = b"Exif\0\0"
_EXIF_WITHIN = 1 << 17
Image.init()
# Pillow's name of a format -> its extension. Rare formats are refused: some of their parsers
# start other programs (EPS), and they are less tested against hostile files.
_EXTENSIONS = {
    name: extension
    for name, extension in {
        "JPEG": "jpg",
        "PNG": "png",
        "WEBP": "webp",
        "BMP": "bmp",
        "DIB": "bmp",
        "GIF": "gif",
        "TIFF": "tiff",
        "PPM": "ppm",
        "AVIF": "avif",
    }.items()
    if name in Image.OPEN
}
_FORMATS = tuple(_EXTENSIONS)
# MPO is a JPEG with further images behind the first. Pillow's JPEG plugin detects it.
_EXTENSIONS["MPO"] = "jpg"
_PNG_DEPTH_AT = 24
_TIFF_BITS_PER_SAMPLE, _TIFF_EXTRA_SAMPLES = 258, 338


@dataclass(frozen=True)
class Header:
    """Facts from an image's header.

    Attributes:
        extension: extension of its format, determined from the bytes.
        height: height in pixels, as `decode` returns it; `width` likewise.
        gray: whether it has one channel.
        orientation: EXIF orientation, 1..8; 1 is upright. `decode` does not apply it.
        notes: changes that `decode` makes beyond decompression.
    """

    extension: str
    height: int
    width: int
    gray: bool
    orientation: int = 1
    notes: tuple[str, ...] = ()


def decode(data: bytes, channels: int, *, bands: Bands = RGB8) -> np.ndarray:
    """Decodes an image, or the first frame of an animation.

    EXIF orientation is not applied: the official MAE code and torchvision's ImageFolder do not
    apply it, and a view must not depend on the decoder. Transparency is dropped, as in ImageFolder.
    Colors are converted to one channel of gray, or three of RGB.

    Returns:
        uint8 (C, H, W), 16 bits scaled to 8; or raw values of the bands' type. The channels of a pixel lie side by side
        in memory, as decoders write them. Moving them into planes would take a third of the decoding time, also for
        pixels that a crop discards.

    Raises:
        DecodeError: for anything truncated, damaged, too large or unknown.
    """
    if not bands.photographs:
        return open_bands(data, bands).pixels
    if jpeg_size(data) is not None:
        with suppress(ValueError):  # simplejpeg refuses it, or it is damaged; Pillow decides
            # strict: otherwise libjpeg silently fills a truncated image with gray.
            pixels = simplejpeg.decode_jpeg(data, colorspace="GRAY" if channels == 1 else "RGB", strict=True)
            return np.asarray(pixels.transpose(2, 0, 1))
    return _decode_with_pillow(data, channels)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Returns (height, width) of a JPEG without decoding it; None if simplejpeg does not decode it."""
    if not data.startswith(_JPEG_MAGIC):
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if height * width > MAX_PIXELS or colorspace in _FOUR_INKS:
        return None
    return int(height), int(width)


def read_header(data: bytes) -> Header:
    """Reads the header without decoding; raises DecodeError if the bytes have none of an accepted format."""
    if data.startswith(_JPEG_MAGIC):
        with suppress(ValueError):
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if data.find(_EXIF_MAGIC, 0, _EXIF_WITHIN) < 0 and colorspace not in _FOUR_INKS:
                return Header("jpg", int(height), int(width), colorspace == "Gray")
    if data.startswith(ARRAY_MAGIC) or is_dicom(data):
        raster = open_raster(data)
        assert raster is not None
        bands, height, width = raster.pixels.shape
        return Header(raster.extension, height, width, bands == 1)
    with _opened(data) as image:
        return replace(header_of(image), notes=_notes(image, data))


def header_of(image: Image.Image) -> Header:
    """Returns the header of an opened image, without notes; an image without a file counts as PNG."""
    return Header(
        extension=_EXTENSIONS.get(str(image.format), "png"),
        height=image.height,
        width=image.width,
        gray=image.mode in ("1", "L", "LA", "I") or image.mode.startswith("I;16"),
        orientation=_orientation(image),
    )


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":
        return 1  # Pillow applies it when it loads a TIFF
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # the parser of damaged EXIF raises many types
        return 1
    return orientation if orientation in range(1, 9) else 1


def _notes(image: Image.Image, data: bytes) -> tuple[str, ...]:
    notes = []
    deep = image.mode == "I" or image.mode.startswith("I;16")
    if image.format == "PNG":
        deep |= data[_PNG_DEPTH_AT] == 16
    elif image.format == "TIFF":
        deep |= 16 in getattr(image, "tag_v2", {}).get(_TIFF_BITS_PER_SAMPLE, ())
    if deep:
        notes.append("of 16 bits scaled to 8")
    if image.mode == "CMYK":
        notes.append("CMYK to RGB")
    if image.mode in ("P", "PA"):
        notes.append("palette to RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        notes.append("transparent, made opaque")
    if image.format != "MPO" and getattr(image, "is_animated", False):
        pages = image.format == "TIFF"
        notes.append("of several pages, first page used" if pages else "animated, first frame used")
    return tuple(notes)


def _decode_with_pillow(data: bytes, channels: int) -> np.ndarray:
    if data.startswith(PNG_MAGIC):
        check_png(data)
    raster = open_raster(data) if is_tiff(data) else None
    with _opened(data) as image:
        if raster is not None:
            # Pillow reads only the first bands of such a file, as it reads only the first of several pages.
            count, deep = 3 if image.mode.startswith("RGB") else 1, raster.pixels
            if len(deep) != count or deep.dtype.name not in ("uint16", "int16") or deep.min() < 0:
                raise DecodeError(f"{raster.kind}, but 8-bit gray or RGB is expected")
            # It misreads planes of 16 bits and white as zero. It divides colors by transparency that they contain.
            if getattr(image, "tag_v2", {}).get(_TIFF_EXTRA_SAMPLES) != (1,):
                upper = pillow_image((deep >> 8).astype(np.uint8))
                upper.getexif()[ExifTags.Base.Orientation] = image.getexif().get(ExifTags.Base.Orientation, 1)
                return pixels_of(ImageOps.exif_transpose(upper), channels)
        image.load()
        return pixels_of(image, channels)


def pixels_of(image: Image.Image, channels: int) -> np.ndarray:
    """Returns the pixels of an opened image, uint8 (C, H, W). It keeps the upper 8 of 16 bits.

    Raises:
        DecodeError: if the range of the pixel values is not known.
    """
    if image.mode == "F":
        raise DecodeError("floating-point pixels have no known range")
    if image.mode.startswith("I"):
        # Pillow's conversion of 16 bits would clip values at 255.
        deep = np.asarray(image).astype(np.int64)
        if deep.size and not 0 <= deep.min() <= deep.max() <= 0xFFFF:
            raise DecodeError("pixels of more than 16 bits")
        return np.repeat((deep >> 8).astype(np.uint8)[..., None], channels, axis=2).transpose(2, 0, 1)
    mode = "L" if channels == 1 else "RGB"
    # Pillow copies even when it converts to the same mode.
    pixels = np.array(image if image.mode == mode else image.convert(mode))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def pillow_image(pixels: np.ndarray) -> Image.Image:
    """Returns uint8 (C, H, W), gray or RGB, as an image of Pillow."""
    return Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))


def decode_mask(data: bytes) -> np.ndarray:
    """Decodes a mask: a PNG of one channel of 8 or 16 bits, or with a palette, whose numbers are class ids.

    It returns uint16 (H, W), and raises DecodeError for anything else.
    """
    if not data.startswith(PNG_MAGIC):
        raise DecodeError("not a PNG; write masks as PNG with one channel or a palette")
    check_png(data)
    with _opened(data, ("PNG",)) as image:
        # Pillow stretches gray values of 2 and 4 bits to 0..255.
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise DecodeError(f"an image of mode {image.mode}; write masks with one channel or a palette")
        if image.mode == "L" and data[_PNG_DEPTH_AT] < 8:
            raise DecodeError(f"gray of {data[_PNG_DEPTH_AT]} bits; store class ids in 8 or 16")
        return np.array(image).astype(np.uint16)


def id_table(ids: list[int], ignore: int) -> np.ndarray:
    """Returns uint16 (65536,): class + 1 of each id, 0 for `ignore`, 65535 for unknown ids."""
    table = np.full(1 << 16, 0xFFFF, np.uint16)
    table[ids] = np.arange(1, len(ids) + 1)
    table[ignore] = 0
    return table


def numbered(mask: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Turns ids uint16 (H, W) into class + 1, by `id_table`; raises DecodeError if a pixel has an unknown id."""
    numbers: np.ndarray = table[mask]
    unknown = numbers == 0xFFFF
    if unknown.any():
        top, left = np.argwhere(unknown)[0]
        raise DecodeError(f"pixel ({top}, {left}) has the id {mask[top, left]}, which is not a class")
    return numbers


@contextmanager
def _opened(data: bytes, formats: tuple[str, ...] = _FORMATS) -> Iterator[Image.Image]:
    """Opens an image by Pillow; turns every error of its parsers on damaged bytes into a DecodeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DecodeError(f"{image.width}x{image.height} pixels exceed the limit of {MAX_PIXELS}")
                yield image
    except DecodeError:
        raise
    except Exception as error:
        reason = first_line(error)
        if image_kind(data[:HEAD_BYTES]) in ARRAY_EXTENSIONS:
            reason = "DICOM or an array, whose raw values are not an 8-bit image; convert it to PNG first"
        elif "cannot identify" in reason:
            reason = what_is(data[:HEAD_BYTES]) or "not an image"
        raise DecodeError(reason) from None
