"""Reads TIFF files of bands by tifffile: samples side by side or in planes, strips or tiles, pages as bands."""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from mae_vit.core.errors import InputError
from mae_vit.data.images.bounds import DecodeError, Raster, check_shape, checked_dtype, first_line

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

# More pages than bands are taken, since overviews lie between them.
MAX_PAGES = 2048
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_WIDTH, _BITS, _PHOTOMETRIC, _DESCRIPTION, _ORIENTATION, _SAMPLES = 256, 258, 262, 270, 274, 277
_EXTRA, _FORMAT, _GDAL_METADATA, _GDAL_NODATA = 338, 339, 42112, 42113
_WHITE_IS_ZERO, _RGB = 0, 2
_SPACES = {3: "palette", 4: "mask", 5: "CMYK", 6: "YCbCr", 8: "Lab", 32803: "a sensor's raw mosaic"}
_UNSIGNED = 1
_TRANSPARENCY = ((1,), (2,))
_UNCOMPRESSED = 1
_COMPRESSIONS = {
    8: "Deflate",
    32946: "Deflate",
    5: "LZW",
    32773: "PackBits",
    34925: "LZMA",
    50000: "Zstandard",
}
# Encoders round sides up to whole tiles, of a few hundred pixels.
_LARGEST_TILE = 4096
_IMAGEJ_IMAGES = re.compile(r"^ImageJ=.{0,200}?^images=(\d{1,6})\s*$", re.DOTALL | re.MULTILINE)
_GDAL_NAME = re.compile(
    r'<Item name="DESCRIPTION" sample="(\d{1,4})" role="description">([^<]{1,200})</Item>'
)
_OME_NAME = re.compile(r'<Channel [^>]{0,2000}?\bName="([^"]{1,200})"')


def is_tiff(data: bytes) -> bool:
    """Whether bytes begin as TIFF files do."""
    return data[:4] in _MAGIC


def open_tiff(data: bytes, *, every_band: bool = False) -> Raster | None:
    """Decodes a TIFF file of bands; with `every_band` also 8-bit images, with their bands of transparency.

    Returns None for gray, RGB, palette and other photographs of 8 bits, which Pillow decodes.

    Raises:
        DecodeError: if it is damaged, or of a kind that is not taken.
        InputError: if a package is missing.
    """
    photograph = _is_photograph(data)
    # Of a damaged directory, Pillow has the reason.
    if photograph is None or (photograph and not every_band):
        return None
    try:
        import tifffile
    except ImportError:
        raise InputError("TIFF files of bands need tifffile; pip install 'mae-vit[bands]'") from None
    # It logs what it tolerates; the error says what it does not.
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            return _read(file, len(data), every_band)
    except (DecodeError, InputError, MemoryError):
        raise
    except Exception as error:  # tifffile and its codecs raise many types on damaged bytes
        raise DecodeError(f"the TIFF file is damaged: {first_line(error)}") from None


def _is_photograph(data: bytes) -> bool | None:
    """Whether Pillow reads all of an image: up to 8 bits, gray (of one page), RGB, palette; None if it is damaged."""
    if data[:4] == b"MM\0+":
        return False  # Pillow does not read BigTIFF of this byte order
    stream = io.BytesIO(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = ImageFileDirectory_v2(stream.read(16 if b"+" in data[2:4] else 8))
            stream.seek(first.next)
            first.load(stream)
            colors = 3 if first.get(_PHOTOMETRIC, 1) == _RGB else 1
            samples, extra = first.get(_SAMPLES, 1), tuple(first.get(_EXTRA, ()))
            if not first[_WIDTH]:
                return None
            if max(first.get(_BITS, (1,))) > 8 or set(first.get(_FORMAT, (_UNSIGNED,))) != {_UNSIGNED}:
                return False
            if first.get(_PHOTOMETRIC, 1) > _RGB:
                return True
            if samples != colors and (samples != colors + 1 or extra not in _TRANSPARENCY):
                return False
            # Pages of gray of 8 bits may be bands.
            pages = first.next or _IMAGEJ_IMAGES.search(first.get(_DESCRIPTION, ""))
            return samples > 1 or max(first.get(_BITS, (1,))) < 8 or not pages
    except Exception:  # Pillow's parser of damaged tags raises many types
        return None


def _read(file: TiffFile, length: int, every_band: bool) -> Raster | None:
    first = file.pages.first
    maybe_gray = first.dtype == np.uint8 and first.samplesperpixel == 1 and not every_band
    try:
        pages = _stack(file)
    except DecodeError:
        if maybe_gray:
            return None
        raise
    images = _imagej_images(first, length) if len(pages) == 1 else 1
    if maybe_gray and len(pages) == images == 1:
        return None
    count = first.samplesperpixel * len(pages) * images
    _check(first, count)
    for page in pages:
        _check_blocks(page, length)
    if images > 1:
        # Behind the first image lie the others, uncompressed and without directories.
        shape = (images, first.imagelength, first.imagewidth)
        dtype = np.dtype(first.dtype).newbyteorder(file.byteorder)
        stack = file.filehandle.read_array(dtype, math.prod(shape), offset=first.dataoffsets[0])
        pixels = stack.reshape(shape)
    else:
        decoded = [_decode(page) for page in pages]
        pixels = decoded[0] if len(decoded) == 1 else np.concatenate(decoded)
    colors, notes = 3 if first.photometric == _RGB else 1, []
    clear = first.samplesperpixel == colors + 1 and tuple(map(int, first.extrasamples)) in _TRANSPARENCY
    if clear and not every_band:
        pixels = pixels[:-1]
        notes.append(f"with a last band marked as transparency, left out (--bands 1-{count} keeps it)")
    if first.photometric == _WHITE_IS_ZERO:
        if pixels.dtype.kind != "u":
            raise DecodeError(f"a TIFF file of {pixels.dtype.name} in which white is zero")
        pixels = np.iinfo(pixels.dtype).max - pixels
        notes.append("white is zero, inverted")
    if first.tags.valueof(_ORIENTATION, 1) != 1:
        notes.append("with an orientation, which is ignored")
    names = _names(first, len(pixels))
    if not names and colors == len(pixels) == 3:
        names = ("red", "green", "blue")
    if len(pages) * images > 1 and not names:
        notes.append("of several pages, which are read as bands (--bands 1 keeps only the first)")
    return Raster("tiff", pixels, names, _nodata(first), tuple(notes))


def _stack(file: TiffFile) -> list[TiffPage]:
    """Returns the pages that are bands of one image: all but overviews and masks."""
    pages, offsets = list[Any](), set[int]()
    for page in file.pages:
        if page.offset in offsets or len(offsets) >= MAX_PAGES:
            raise DecodeError(f"its TIFF directories form a circle, or are over {MAX_PAGES}")
        offsets.add(page.offset)
        if not pages or not (page.is_reduced or page.is_mask):
            pages.append(page)
    kinds = [f"{p.samplesperpixel} x {p.imagelength} x {p.imagewidth} {_type_name(p)}" for p in pages]
    if others := set(kinds) - {kinds[0]}:
        raise DecodeError(
            f"its {len(pages)} pages differ ({kinds[0]}, {others.pop()}), so they are not bands of one image"
        )
    if len(pages) > 1 and pages[0].samplesperpixel > 1:
        raise DecodeError(
            f"{len(pages)} pages of {pages[0].samplesperpixel} bands each; only pages of one band, or one page, can "
            "be read"
        )
    return pages


def _type_name(page: TiffPage) -> str:
    if page.dtype is None or 8 * page.dtype.itemsize != page.bitspersample:
        return f"of {page.bitspersample} bits"
    return str(page.dtype.name)


def _check(page: TiffPage, count: int) -> None:
    """Checks what a page declares, before memory is taken for it."""
    dtype = checked_dtype(_type_name(page))
    if page.photometric > _RGB:
        raise DecodeError(
            f"a TIFF file of {_SPACES.get(page.photometric, 'an unknown color space')}, {dtype}"
        )
    if page.compression != _UNCOMPRESSED:
        if page.compression not in _COMPRESSIONS:
            name = getattr(page.compression, "name", f"number {page.compression}")
            taken = ", ".join(dict.fromkeys(_COMPRESSIONS.values()))
            raise DecodeError(
                f"{count} bands of {dtype} compressed as {name}; only uncompressed, {taken} can be read"
            )
        try:
            import imagecodecs  # noqa: F401  tifffile's own Deflate unpacks more than a header declares
        except ImportError:
            name = _COMPRESSIONS[page.compression]
            raise InputError(
                f"TIFF files with {name} need imagecodecs; pip install 'mae-vit[bands]'"
            ) from None
    check_shape(count, page.imagelength, page.imagewidth, dtype)
    if page.imagedepth != 1:
        raise DecodeError(f"a TIFF file of volumes, {page.imagedepth} deep; write each slice as an image")


def _check_blocks(page: TiffPage, length: int) -> None:
    """Checks that the blocks of a page are as many as its size needs, and lie in the file of `length` bytes."""
    rows = page.tilelength if page.is_tiled else page.rowsperstrip
    columns = page.tilewidth if page.is_tiled else page.imagewidth
    if min(rows, columns) < 1 or max(rows - page.imagelength, columns - page.imagewidth) > _LARGEST_TILE:
        raise DecodeError(f"TIFF directory {page.index} has blocks of {columns}x{rows} pixels")
    needed, blocks = math.prod(page.chunked), len(page.dataoffsets)
    if blocks != needed or len(page.databytecounts) != needed:
        raise DecodeError(f"TIFF directory {page.index} has {blocks} blocks, its size needs {needed}")
    if any(at + count > length for at, count in zip(page.dataoffsets, page.databytecounts, strict=True)):
        raise DecodeError("the TIFF file is truncated")


def _decode(page: TiffPage) -> np.ndarray:
    """Decodes a page: (samples, H, W)."""
    # (planes, H, W, samples side by side)
    array: np.ndarray = page.asarray(maxworkers=1, squeeze=False)[:, 0]
    return array[..., 0] if array.shape[-1] == 1 else array[0].transpose(2, 0, 1)


def _imagej_images(page: TiffPage, length: int) -> int:
    """Returns how many images ImageJ says that its file holds, which may lie behind one directory; else 1."""
    counted = _IMAGEJ_IMAGES.search(page.description)
    images = int(counted[1]) if counted and page.samplesperpixel == 1 else 1
    if images > 1 and (not page.is_contiguous or page.dataoffsets[0] + images * page.nbytes > length):
        raise DecodeError(f"an ImageJ stack of {images} images; write each as an image of its own")
    return images


def _names(page: TiffPage, count: int) -> tuple[str, ...]:
    """Returns the names of the bands that GDAL or OME wrote down; empty unless each band has one of its own."""
    gdal = _GDAL_NAME.findall(str(page.tags.valueof(_GDAL_METADATA, "")))
    names: Mapping[int, str] = {int(number): name.strip() for number, name in gdal}
    if not names and "<OME" in page.description:
        names = {number: name.strip() for number, name in enumerate(_OME_NAME.findall(page.description))}
    values = tuple(names.get(number, "") for number in range(count))
    good = len(names) == count and all(values) and len(set(values)) == count
    return values if good and not any("," in value for value in values) else ()


def _nodata(page: TiffPage) -> float | None:
    """Returns the value of missing pixels that GDAL wrote down."""
    text: Any = page.tags.valueof(_GDAL_NODATA, "")
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if value == value else None
