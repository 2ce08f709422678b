"""Decodes TIFF files of any layout: samples side by side or in planes, strips or tiles, pages as bands.

Uncompressed and Deflate are decoded here, in bounded memory and a tenth of tifffile's time for small tiles.
tifffile decodes the rest.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Sequence

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.data.images.bands.raster import Raster, check_shape, checked_dtype
from mae_vit.data.images.bands.tiff_pages import Page, TiffPages, imagej_images, names_of, nodata_of
from mae_vit.data.images.bounds import DecodeError

_NONE, _LZW, _DEFLATE, _PACKBITS, _OLD_DEFLATE, _LZMA, _ZSTD = 1, 5, 8, 32773, 32946, 34925, 50000
_OTHERS = {_LZW: "LZW", _PACKBITS: "PackBits", _LZMA: "LZMA", _ZSTD: "Zstandard"}
_COMPRESSIONS = {
    2: "CCITT",
    6: "old JPEG",
    7: "JPEG",
    33003: "JPEG 2000",
    33005: "JPEG 2000",
    34712: "JPEG 2000",
}
_COMPRESSIONS |= {34887: "LERC", 50001: "WebP", 50002: "JPEG XL"}
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE = 0, 1, 2, 3
_SPACES = {3: "palette", 4: "mask", 5: "CMYK", 6: "YCbCr", 8: "Lab", 32803: "a sensor's raw mosaic"}
_NO_PREDICTOR, _HORIZONTAL = 1, 2
_TRANSPARENCY = (1, 2)


def open_tiff(data: bytes, max_pixels: int | None, *, every_band: bool = False) -> Raster | None:
    """Reads the directories of a TIFF file.

    Args:
        data: the file.
        max_pixels: see `check_shape`.
        every_band: read images of 8 bits too, with their bands of transparency.

    Returns:
        The image; None for gray, RGB, palette and other photographs of 8 bits, which Pillow decodes.

    Raises:
        DecodeError: if it is damaged, or of a kind that is not taken.
    """
    reader = TiffPages(data)
    try:
        first = reader.read()
    except DecodeError:
        return None  # Pillow reads some of these, and has the reason for the others
    if first is None or (_is_photograph(first) and not every_band and first.samples > 1):
        return None
    if first.dtype in ("uint1", "uint4") or (first.dtype == "uint8" and first.photometric not in (0, 1, 2)):
        return None
    try:
        pages = _stack(first, reader)
    except DecodeError:
        if _is_photograph(first) and not every_band:
            return None
        raise
    if _is_photograph(first) and len(pages) == 1 and imagej_images(first) == 1 and not every_band:
        return None
    return _raster(data, pages, max_pixels, every_band)


def _is_photograph(page: Page) -> bool:
    """Whether a page is gray or RGB of 8 bits, with or without transparency."""
    colors = 3 if page.photometric == _RGB else 1
    extra = page.samples - colors
    clear = extra == 1 and len(page.extra) == 1 and page.extra[0] in _TRANSPARENCY
    return page.dtype == "uint8" and (extra == 0 or clear)


def _stack(first: Page, reader: TiffPages) -> list[Page]:
    """Returns the pages that are bands of one image: all but overviews and masks."""
    pages = [first]
    while (page := reader.read()) is not None:
        if not page.reduced:
            pages.append(page)
    if shapes := {page.shape for page in pages[1:]} - {first.shape}:
        other = _text(*shapes.pop())
        raise DecodeError(
            f"its {len(pages)} pages differ ({_text(*first.shape)}, {other}): they are no bands of one image"
        )
    if len(pages) > 1 and first.samples > 1:
        raise DecodeError(
            f"{len(pages)} pages of {first.samples} bands each: taken are pages of one, or one page"
        )
    return pages


def _text(samples: int, height: int, width: int, dtype: str) -> str:
    return f"{samples} x {height} x {width} {dtype}"


def _raster(data: bytes, pages: list[Page], max_pixels: int | None, every_band: bool) -> Raster:
    first = pages[0]
    dtype = checked_dtype(first.dtype)
    if first.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB):
        raise DecodeError(
            f"a TIFF file of {_SPACES.get(first.photometric, 'an unknown color space')}, {dtype}"
        )
    if first.compression not in (_NONE, _DEFLATE, _OLD_DEFLATE, *_OTHERS):
        name = _COMPRESSIONS.get(first.compression, f"number {first.compression}")
        raise DecodeError(f"{first.samples} bands of {dtype} compressed as {name}: taken are none, Deflate, "
                          f"{', '.join(_OTHERS.values())}")  # fmt: skip
    images = imagej_images(first) if len(pages) == 1 and first.samples == 1 else 1
    count = first.samples * len(pages) * images
    check_shape(count, first.height, first.width, dtype, max_pixels)
    for page in pages:
        _check_blocks(page, len(data), images)
    colors = 3 if first.photometric == _RGB else 1
    clear = len(first.extra) == 1 and first.extra[0] in _TRANSPARENCY and first.samples == colors + 1
    dropped, notes = clear and not every_band, []
    if dropped:
        count -= 1
        notes.append(f"with a last band marked as transparency, left out (--bands 1-{count + 1} takes it)")
    if first.photometric == _WHITE_IS_ZERO:
        notes.append("white is zero, inverted")
        if not dtype.startswith("uint"):
            raise DecodeError(f"a TIFF file of {dtype} in which white is zero")
    names = names_of(first, count) or (("red", "green", "blue") if colors == 3 and count == 3 else ())
    if len(pages) * images > 1 and not names:
        notes.append("of several pages, which are bands (--bands 1 takes the first page alone)")
    if first.oriented:
        notes.append("with an orientation, which is ignored")

    def pixels() -> np.ndarray:
        array = _decode(data, pages, images)[:count]
        return np.iinfo(dtype).max - array if first.photometric == _WHITE_IS_ZERO else array

    return Raster(
        "tiff", first.height, first.width, count, dtype, pixels, names, nodata_of(first), tuple(notes)
    )


def _check_blocks(page: Page, length: int, images: int) -> None:
    """Checks that the blocks of a page are as many as its size needs, and lie in the file."""
    (rows, columns), planes = page.block, page.samples if page.planar else 1
    if min(rows, columns) < 1 or page.height < 1 or page.width < 1:
        raise DecodeError(f"TIFF directory {page.number} has blocks of {columns}x{rows} pixels")
    if page.tiled and (rows > page.height + 4096 or columns > page.width + 4096):
        raise DecodeError(f"TIFF directory {page.number} has tiles of {columns}x{rows} pixels")
    needed = -(-page.height // rows) * -(-page.width // columns) * planes
    if len(page.offsets) != needed or len(page.counts) != needed:
        raise DecodeError(
            f"TIFF directory {page.number} has {len(page.offsets)} blocks, its size needs {needed}"
        )
    if any(at + count > length for at, count in zip(page.offsets, page.counts, strict=True)):
        raise DecodeError("the TIFF file is truncated")
    if images > 1 and (
        page.compression != _NONE or needed != 1 or page.offsets[0] + page.counts[0] * images > length
    ):
        raise DecodeError(f"an ImageJ stack of {images} images, of which one can be read")


def _decode(data: bytes, pages: Sequence[Page], images: int) -> np.ndarray:
    first = pages[0]
    own = first.compression in (_NONE, _DEFLATE, _OLD_DEFLATE) and first.predictor in (1, 2) and first.plain
    if not own:
        return _by_tifffile(data, pages)
    if (plain := _in_place(data, pages, images)) is not None:
        return plain
    planes = [_page(data, page) for page in pages]
    return planes[0] if len(planes) == 1 else np.concatenate(planes)


def _in_place(data: bytes, pages: Sequence[Page], images: int) -> np.ndarray | None:
    """Returns uncompressed pixels that lie in one piece, without a copy; None where they do not."""
    first, end = pages[0], pages[0].offsets[0]
    start = end
    for page in pages:
        if page.compression != _NONE or page.predictor != _NO_PREDICTOR or page.tiled:
            return None
        for at, count in zip(page.offsets, page.counts, strict=True):
            if at != end:
                return None
            end += count
    dtype = _in_file(first)
    planes = len(pages) * images
    number = first.samples * planes * first.height * first.width
    if images == 1 and end - start != number * dtype.itemsize:
        return None
    flat = np.frombuffer(data, dtype, number, start)
    if first.samples > 1 and not first.planar:
        array = flat.reshape(first.height, first.width, first.samples).transpose(2, 0, 1)
    else:
        array = flat.reshape(first.samples * planes, first.height, first.width)
    return array if dtype.isnative else array.astype(first.dtype)


def _page(data: bytes, page: Page) -> np.ndarray:
    """Decodes the blocks of a page: (samples, H, W)."""
    (rows, columns), dtype = page.block, np.dtype(page.dtype)
    inside, planes = (1, page.samples) if page.planar else (page.samples, 1)
    out = np.empty((planes, page.height, page.width, inside), dtype)
    across = -(-page.width // columns)
    down = -(-page.height // rows)
    for number, (at, count) in enumerate(zip(page.offsets, page.counts, strict=True)):
        plane, place = divmod(number, across * down)
        top, left = (place // across) * rows, (place % across) * columns
        # Tiles are whole at the borders; the last strip is not.
        high = rows if page.tiled else min(rows, page.height - top)
        block = _unpacked(data[at : at + count], page, (high, columns, inside))
        bottom, right = min(top + high, page.height), min(left + columns, page.width)
        out[plane, top:bottom, left:right] = block[: bottom - top, : right - left]
    return out[..., 0] if page.planar or inside == 1 else out[0].transpose(2, 0, 1)


def _unpacked(block: bytes, page: Page, shape: tuple[int, int, int]) -> np.ndarray:
    """Unpacks one block to (rows, columns, samples); what is declared bounds what is unpacked."""
    dtype = np.dtype(page.dtype)
    size = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if page.compression != _NONE:
        try:
            block = zlib.decompressobj().decompress(block, size)
        except zlib.error as error:
            raise DecodeError(f"its Deflate data is damaged: {error}") from None
    if len(block) < size:
        raise DecodeError("its pixels are truncated")
    values = np.frombuffer(block[:size], _in_file(page)).reshape(shape).astype(dtype)
    if page.predictor == _HORIZONTAL:
        if dtype.kind == "f":
            raise DecodeError("floating-point pixels stored as differences of whole numbers")
        np.cumsum(values, axis=1, dtype=dtype, out=values)
    return values


def _in_file(page: Page) -> np.dtype:
    dtype = np.dtype(page.dtype)
    return dtype.newbyteorder("<") if page.order == "<" else dtype.newbyteorder(">")


def _by_tifffile(data: bytes, pages: Sequence[Page]) -> np.ndarray:
    first = pages[0]
    what = _OTHERS.get(
        first.compression, "floating-point predictor" if first.predictor == 3 else "reversed bits"
    )
    try:
        import tifffile
    except ImportError:
        raise InputError(f"TIFF files with {what} need tifffile: pip install 'mae-vit[bands]'") from None
    # It logs what it tolerates; the error says what it does not.
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    planes = []
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            for page in pages:
                planes.append(_checked(file.pages[page.number].asarray(maxworkers=1), page))
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # tifffile and its codecs raise many types on damaged bytes
        if "imagecodecs" in str(error):
            raise InputError(
                f"TIFF files with {what} need imagecodecs: pip install 'mae-vit[bands]'"
            ) from None
        raise DecodeError(f"its {what} data is damaged: {(str(error).splitlines() or ['?'])[0]}") from None
    return planes[0] if len(planes) == 1 else np.concatenate(planes)


def _checked(array: np.ndarray, page: Page) -> np.ndarray:
    shape = (page.samples, page.height, page.width)
    if array.size != shape[0] * shape[1] * shape[2] or array.dtype.name != page.dtype:
        raise DecodeError("tifffile reads another size than its directory says")
    if page.planar or page.samples == 1:
        return array.reshape(shape)
    return array.reshape(*shape[1:], shape[0]).transpose(2, 0, 1)
