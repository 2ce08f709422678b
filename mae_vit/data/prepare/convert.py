"""Converts the bytes of an image to a member of a shard, with statistics and a perceptual hash."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageOps

from mae_vit.core.errors import InputError
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.data.images.bands.raster import Raster
from mae_vit.data.images.bands.read import open_raster
from mae_vit.data.images.decode import MAX_PIXELS, DecodeError, decode, read_header
from mae_vit.data.images.preprocess import (
    DEFAULT_QUALITY,
    as_photograph,
    changes,
    encode_anew,
    take_bands,
)
from mae_vit.data.prepare.bands.options import EIGHT_BIT, NO_OPTIONS, BandLayout, BandOptions, nodata_for
from mae_vit.data.prepare.bands.statistics import BandStatistics

_SAME = {"jpeg": "jpg", "tif": "tiff"}
# Rare extensions, which webdataset does not decode.
_RARE = {"jpe": "jpg", "jfif": "jpg", "pgm": "ppm", "pbm": "ppm", "pnm": "ppm"}
Sums = dict[BandLayout, BandStatistics]


@dataclass(frozen=True)
class Conversion:
    """How images are stored.

    Attributes:
        resize: short side in pixels that larger images are resized to; None keeps them.
        quality: JPEG quality of images that are encoded again.
        upright: apply EXIF orientation.
        max_pixels: largest number of pixels; larger images are left out.
        hashed: hash the stored image.
        in_place: keep the bytes of images unchanged.
        bands: options of images other than 8-bit photographs.
    """

    resize: int | None = None
    quality: int = DEFAULT_QUALITY
    upright: bool = False
    max_pixels: int = MAX_PIXELS
    hashed: bool = False
    in_place: bool = False
    bands: BandOptions = NO_OPTIONS

    @property
    def preprocessing(self) -> Preprocessing:
        """The changes to pixels, which inference has to repeat."""
        anew = self.resize is not None or self.upright
        return Preprocessing(
            resize=self.resize,
            quality=self.quality if anew else None,
            exif_orientation="apply" if self.upright else "ignore",
            bands=self.bands.select or None,
            window=self.bands.window,
        )


@dataclass(frozen=True)
class Converted:
    """An image in its stored form.

    Attributes:
        data: encoded bytes; None if they are those of the source.
        extension: extension in the shard.
        height: height in pixels.
        width: width in pixels.
        gray: whether it has one channel.
        total: sum of the pixels, by RGB channel.
        squares: sum of the squared pixels, by RGB channel.
        notes: remarks; equal remarks on several images are printed once, with their number.
        hash: hashes of the image and of its mirror image, if `Conversion.hashed`.
        layout: layout of the bands; None for 8-bit photographs.
        sums: band statistics of a whole chunk; only the first image with bands in each chunk has them.
    """

    data: bytes | None
    extension: str
    height: int
    width: int
    gray: bool
    total: tuple[int, ...]
    squares: tuple[int, ...]
    notes: tuple[str, ...] = ()
    hash: tuple[int, int] | None = None
    layout: BandLayout | None = None
    sums: tuple[tuple[BandLayout, BandStatistics], ...] = ()

    @property
    def kind(self) -> str:
        """Bands and type such as "13xuint16", or "8-bit"."""
        return EIGHT_BIT if self.layout is None else self.layout.kind


def convert(data: bytes, extension: str, options: Conversion, sums: Sums | None = None) -> Converted:
    """Decodes an image, and encodes it again if `options` require it.

    Args:
        data: an encoded image.
        extension: extension of its file.
        options: how images are stored.
        sums: receives the statistics of bands; those of 8-bit photographs are in the result.

    Raises:
        DecodeError: if it is damaged, too large or no image.
        InputError: if a package is missing, or an option does not apply to bands.
    """
    wanted = options.bands
    if wanted.take != EIGHT_BIT:
        raster = open_raster(data, max_pixels=options.max_pixels, every_band=wanted.every_band)
        photograph = None if raster is None or options.in_place or wanted.given else as_photograph(raster)
        if photograph is not None:
            image = convert(photograph, "png", options)
            return image if image.data is not None else replace(image, data=photograph)
        if raster is not None:
            return _convert_bands(raster, extension, options, {} if sums is None else sums)
        if wanted.given:
            read_header(data)  # raises first if this is no image
            raise DecodeError(f"8-bit gray or RGB, which {wanted.given[0]} does not go with")
    header, how = read_header(data), options.preprocessing
    pixels = decode(data, 1 if header.gray else 3, max_pixels=options.max_pixels)
    notes, stored = list(header.notes), None
    if header.orientation != 1:
        ignored = "with an EXIF orientation, which is ignored (--exif-orientation apply turns them)"
        notes.append("turned upright" if options.upright else ignored)
    if changes(header, how):
        stored, extension = encode_anew(pixels, header, how)
        pixels = decode(stored, len(pixels))
    elif _SAME.get(extension, extension) != header.extension:
        if _RARE.get(extension) != header.extension:
            notes.append("named as another format")
        extension = header.extension
    total, squares = _sums(pixels)
    return Converted(
        data=stored,
        extension=extension,
        height=pixels.shape[1],
        width=pixels.shape[2],
        gray=header.gray,
        total=total * (3 // len(total)),
        squares=squares * (3 // len(squares)),
        notes=tuple(notes),
        hash=phash(pixels) if options.hashed else None,
    )


def convert_chunk(chunk: list[tuple[bytes, str]], options: Conversion) -> list[Converted | str]:
    """Converts several images; the result is a reason for each that cannot be converted."""
    results: list[Converted | str] = []
    sums: Sums = {}
    for data, extension in chunk:
        try:
            results.append(convert(data, extension, options, sums))
        except DecodeError as error:
            results.append(str(error))
        except MemoryError:
            # The other images may be smaller.
            results.append("takes more memory than there is (see --max-pixels)")
    for index, result in enumerate(results):
        if isinstance(result, Converted) and result.layout is not None:
            results[index] = replace(result, sums=tuple(sums.items()))
            break
    return results


def _convert_bands(raster: Raster, extension: str, options: Conversion, sums: Sums) -> Converted:
    """Selects bands, clips, resizes, adds to the statistics, and encodes the array (C, H, W) as NPY.

    Training decodes NPY fast, whatever the format of the source was. In place, the bytes stay unchanged.
    """
    wanted = options.bands
    if options.hashed:
        raise InputError(f"--exclude compares photographs of 8 bits; an image is {raster.kind}")
    if wanted.take not in (None, raster.kind) and not wanted.select:
        raise DecodeError(f"{raster.kind}, where {wanted.take} is taken")
    nodata = nodata_for(raster.pixels.dtype.name, wanted.nodata, raster.nodata)
    pixels, names = take_bands(raster, options.preprocessing, nodata)
    layout = BandLayout(names, pixels.dtype.name, nodata, bool(raster.names))
    if wanted.take not in (None, layout.kind):
        raise DecodeError(f"{layout.kind}, where {wanted.take} is taken")
    if layout not in sums:
        sums[layout] = BandStatistics(len(names), layout.dtype, nodata)
    sums[layout].add(pixels)
    count, height, width = pixels.shape
    stored, notes = None, raster.notes
    if not options.in_place:
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(pixels), allow_pickle=False)
        stored, extension = stream.getvalue(), "npy"
        notes += () if raster.extension == "npy" else ("written as .npy",)
    elif _SAME.get(extension, extension) != raster.extension:
        notes += ("named as another format",)
    return Converted(stored, extension, height, width, count == 1, (0, 0, 0), (0, 0, 0), notes, layout=layout)


def _sums(pixels: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns exact integer sums of pixels and of squared pixels, by channel."""
    flat = pixels.reshape(len(pixels), -1)
    # 255^2 fits 16 bits.
    squares = np.square(flat, dtype=np.uint16)
    return (
        tuple(int(v) for v in flat.sum(axis=1, dtype=np.uint64)),
        tuple(int(v) for v in squares.sum(axis=1, dtype=np.uint64)),
    )


# Recorded in `dataset.json`: only hashes with the same name are comparable.
HASH_NAME = "pHash of 64 bits"
_HASHED_SIDE = 32


def phash(pixels: np.ndarray) -> tuple[int, int]:
    """Hashes an image and its mirror image by the pHash of ImageHash (Zauner 2010, Sec. 3.2.1).

    Args:
        pixels: uint8 (C, H, W), C 1 or 3.

    Returns:
        Two integers of 64 bits.
    """
    import imagehash  # optional; slow to import

    image = Image.fromarray(
        pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
    )
    # The first step of the library, done here so that the mirror image has the same pixels.
    small = image.convert("L").resize((_HASHED_SIDE, _HASHED_SIDE), Image.Resampling.LANCZOS)
    there, back = (int(str(imagehash.phash(side)), 16) for side in (small, ImageOps.mirror(small)))
    return there, back
