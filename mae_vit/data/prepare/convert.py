"""Converts images to members of shards, with statistics and a perceptual hash: in order, on several processes."""

from __future__ import annotations

import io
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageOps

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.core.progress import progress
from mae_vit.data.images.bands.dicom import is_dicom
from mae_vit.data.images.bands.read import open_raster
from mae_vit.data.images.bounds import Raster
from mae_vit.data.images.decode import DecodeError, Header, decode, decode_mask, read_header
from mae_vit.data.images.preprocess import as_photograph, changes, encode_anew, pillow_image, take_bands
from mae_vit.data.prepare.bands import EIGHT_BIT, BandLayout, BandStatistics, nodata_for
from mae_vit.data.prepare.entries import Entry, raise_if_passing
from mae_vit.data.shards.dataset_json import Dataset
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.runtime.signals import blocked, exit_with_parent, without_main

Encoded = tuple[Entry, bytes]
_SAME = {"jpeg": "jpg", "tif": "tiff"}
# Rare extensions, which webdataset does not decode.
_RARE = {"jpe": "jpg", "jfif": "jpg", "pgm": "ppm", "pbm": "ppm", "pnm": "ppm"}
Sums = dict[BandLayout, BandStatistics]
# Large enough that the round trip costs little, small enough to balance the processes.
_CHUNK_IMAGES = 256
_CHUNK_BYTES = 4 << 20
# Size of a chunk that this process converts: a step of the progress bar.
_FEW_IMAGES = 16
# Fewer images are converted faster than processes start.
_MIN_IMAGES = 512
_MAX_WORKERS = 16
# Recorded in `dataset.json`: only hashes with the same name are comparable.
HASH_NAME = "pHash of 64 bits"
_HASHED_SIDE = 32


@dataclass(frozen=True)
class Conversion:
    """How images are stored.

    Attributes:
        how: the changes to pixels, which inference has to repeat.
        hashed: hash the stored image.
        in_place: keep the bytes of images unchanged.
        scale: "percentiles", "none", or the raw values of bands that become 0 and 1; None chooses.
        nodata: raw value of missing pixels; None for the value in the files.
        take: the kind of images to take if files differ, such as "13xuint16" or "8-bit".
        names: names of the stored bands, where files have none.
    """

    how: Preprocessing = UNCHANGED
    hashed: bool = False
    in_place: bool = False
    scale: str | tuple[float, float] | None = None
    nodata: float | None = None
    take: str | None = None
    names: tuple[str, ...] = ()

    @property
    def of_bands(self) -> tuple[str, ...]:
        """The options of bands that are set, by their names on the command line."""
        values = {
            "--bands": self.how.bands,
            "--window": self.how.window,  # sets the scale, too
            "--scale": self.scale,
            "--nodata": self.nodata,
            "--take": self.take,
        }
        return tuple(name for name, value in values.items() if value is not None)


def as_before(wanted: Conversion, known: Dataset | None) -> Conversion:
    """Takes what files do not state from a description: 8 bits; or scale and missing value, if not set, and names."""
    table = known.band_table if known else None
    if table is None:
        return replace(wanted, take=EIGHT_BIT) if known and not wanted.of_bands else wanted
    by = table.scale.by.partition(" ")[0]
    scale = (table.scale.low[0], table.scale.high[0]) if by == "given" else by
    nodata = table.nodata if wanted.nodata is None else wanted.nodata
    return replace(wanted, scale=wanted.scale or scale, nodata=nodata, names=tuple(table.names))


@dataclass(frozen=True)
class Converted:
    """An image in its stored form.

    Attributes:
        data: encoded bytes; None if they are those of the source.
        extension: extension in the shard.
        height: height in pixels; `width` likewise.
        gray: whether it has one channel.
        total: sum of the pixels, by RGB channel; `squares` of the squared pixels.
        source: header of the image as it was.
        turned: whether it was turned upright by its EXIF orientation.
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
    source: Header
    turned: bool = False
    notes: tuple[str, ...] = ()
    hash: tuple[int, int] | None = None
    layout: BandLayout | None = None
    sums: tuple[tuple[BandLayout, BandStatistics], ...] = ()

    @property
    def kind(self) -> str:
        """Bands and type such as "13xuint16", or "8-bit"."""
        return EIGHT_BIT if self.layout is None else self.layout.kind


def convert(data: bytes, extension: str, options: Conversion, sums: Sums | None = None) -> Converted:
    """Decodes an image, and encodes it again if `options` require it; `sums` receives the statistics of bands.

    Raises:
        DecodeError: if it is damaged, too large or no image.
        InputError: if a package is missing, or an option does not apply to bands.
    """
    given, raster = options.of_bands, None
    photographs = options.take == EIGHT_BIT or not (given or options.in_place)
    if options.take != EIGHT_BIT or is_dicom(data):
        # An option that concerns bands or their values reads 8-bit TIFF files as bands, too.
        every_band = any(name != "--take" for name in given)
        raster = open_raster(data, every_band=every_band, count=len(options.names) or None)
        photograph = as_photograph(raster) if raster is not None and photographs else None
        if photograph is not None:
            image = convert(photograph, "png", options)
            return image if image.data is not None else replace(image, data=photograph)
    if options.take != EIGHT_BIT:
        if raster is not None:
            return _convert_bands(raster, extension, options, {} if sums is None else sums)
        if given:
            read_header(data)  # raises first if this is no image
            raise DecodeError(f"8-bit gray or RGB, which {given[0]} does not apply to")
    header, how = read_header(data), options.how
    pixels = decode(data, 1 if header.gray else 3)
    notes, stored = list(header.notes), None
    if header.orientation != 1:
        ignored = "with an EXIF orientation, which is ignored (--exif-orientation apply turns them)"
        notes.append("turned upright" if how.exif_orientation == "apply" else ignored)
    if changes(header, how):
        stored, extension = encode_anew(pixels, header, how)
        pixels = decode(stored, len(pixels))
    elif _SAME.get(extension, extension) != header.extension:
        if _RARE.get(extension) != header.extension:
            notes.append("named as another format")
        extension = extension if options.in_place else header.extension
    # Exact integers, by channel; 255^2 fits 16 bits.
    flat = pixels.reshape(len(pixels), -1)
    total = flat.sum(axis=1, dtype=np.uint64).tolist()
    squares = np.square(flat, dtype=np.uint16).sum(axis=1, dtype=np.uint64).tolist()
    return Converted(
        data=stored,
        extension=extension,
        height=pixels.shape[1],
        width=pixels.shape[2],
        gray=header.gray,
        total=tuple(total * (3 // len(total))),
        squares=tuple(squares * (3 // len(squares))),
        source=header,
        turned=header.orientation != 1 and how.exif_orientation == "apply",
        notes=tuple(notes),
        hash=phash(pixels) if options.hashed else None,
    )


def default_workers() -> int:
    """Returns the default number of processes: one for each core, up to a limit; 0 on a single core."""
    cores = cores_of_rank()
    return min(cores, _MAX_WORKERS) if cores > 1 else 0


def convert_entries(
    entries: Iterable[Entry],
    options: Conversion,
    workers: int,
    doing: str,
    failed: list[str],
    *,
    count: int,
    skips: Callable[[Entry, bytes], bool] = lambda entry, data: False,
) -> Generator[tuple[Entry, bytes, Converted], None, None]:
    """Reads and converts `count` images: yields entries in order, with their bytes and stored form.

    `failed` receives the images that cannot be read or converted, or whose masks cannot be decoded, with the reason;
    `doing` names the progress bar. An image that `skips`, by its bytes, is not converted: band statistics count all
    that are.

    Raises:
        InputError: if a process died, or the machine or its network fails.
    """

    def readable() -> Iterator[Encoded]:
        for entry in entries:
            where = entry.path
            try:
                data = entry.read()
                if entry.read_mask is not None:
                    where = f"the mask of {where}"
                    decode_mask(entry.read_mask())
            except (DecodeError, OSError) as error:
                raise_if_passing(where, error)
                failed.append(f"{plain_text(where)}: {error}")
                continue
            if not skips(entry, data):
                yield entry, data

    with progress(total=count, desc=doing, unit=" images") as bar:
        for chunk, results in _convert_chunks(readable(), count, options, workers):
            for (entry, data), image in zip(chunk, results, strict=True):
                bar.update()
                if isinstance(image, str):
                    failed.append(f"{plain_text(entry.path)}: {image}")
                else:
                    yield entry, data, image
        bar.update(count - bar.n)


def _convert_chunks(
    images: Iterable[Encoded], count: int, options: Conversion, workers: int
) -> Iterator[tuple[list[Encoded], list[Converted | str]]]:
    """Yields chunks of images in order, and the result of each image: a reason if it cannot be converted."""
    if not workers or count < _MIN_IMAGES:
        for chunk in _chunks(images, _FEW_IMAGES):
            yield chunk, convert_chunk(_task(chunk), options)
        return
    # Not forkserver: a process has one such server, with fixed imports, and training's server imports torch.
    # The imports of these workers take 0.2 s.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=exit_with_parent)

    def submit(task: list[tuple[bytes, str]]) -> Future[list[Converted | str]]:
        with without_main():  # submitting may start a process
            return executor.submit(convert_chunk, task, options)

    pending: deque[tuple[list[Encoded], Future[list[Converted | str]]]] = deque()
    try:
        # Workers inherit the blocked signal: Ctrl-C is for this process, which receives it afterwards.
        with blocked([signal.SIGINT]):
            for _ in range(workers):  # one task each starts all workers
                submit([])
        for chunk in _chunks(images, _CHUNK_IMAGES):
            pending.append((chunk, submit(_task(chunk))))
            # Two chunks a worker: none waits while this process writes.
            if len(pending) > 2 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    except BrokenProcessPool:
        raise InputError(
            "a process that decodes images died; use fewer --workers if memory ran out, else find the image with "
            "--workers 0"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _chunks(images: Iterable[Encoded], count: int) -> Iterator[list[Encoded]]:
    chunk: list[Encoded] = []
    size = 0
    for image in images:
        chunk.append(image)
        size += len(image[1])
        if len(chunk) >= count or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _task(chunk: Iterable[Encoded]) -> list[tuple[bytes, str]]:
    return [(data, entry.extension) for entry, data in chunk]


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
            results.append("needs more memory than there is")
    for index, result in enumerate(results):
        if isinstance(result, Converted) and result.layout is not None:
            results[index] = replace(result, sums=tuple(sums.items()))
            break
    return results


def _convert_bands(raster: Raster, extension: str, options: Conversion, sums: Sums) -> Converted:
    """Selects bands, clips, resizes, adds to the statistics, and encodes the array (C, H, W) as NPY.

    Training decodes NPY fast, whatever the format of the source was. In place, the bytes stay unchanged.
    """
    if options.hashed:
        raise InputError(
            f"--exclude needs 8-bit photographs, but an image is {raster.kind}; leave --exclude out"
        )
    if options.take not in (None, raster.kind) and not options.how.bands:
        raise DecodeError(f"{raster.kind}, but --take keeps {options.take}")
    nodata = nodata_for(raster.pixels.dtype.name, options.nodata, raster.nodata)
    if not raster.names and len(options.names) == len(raster.pixels):
        raster = replace(raster, names=options.names)
    pixels, names = take_bands(raster, options.how, nodata)
    layout = BandLayout(names, pixels.dtype.name, nodata, bool(raster.names))
    if options.take not in (None, layout.kind):
        raise DecodeError(f"{layout.kind}, but --take keeps {options.take}")
    every, rows, columns = raster.pixels.shape
    source = Header(raster.extension, rows, columns, every == 1)
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
    gray, zero = count == 1, (0, 0, 0)
    return Converted(
        stored, extension, height, width, gray, zero, zero, source=source, notes=notes, layout=layout
    )


def phash(pixels: np.ndarray) -> tuple[int, int]:
    """Hashes uint8 (C, H, W) and its mirror image to 64 bits by the pHash of ImageHash (Zauner 2010, Sec. 3.2.1)."""
    import imagehash  # optional; slow to import

    # The first step of the library, done here so that the mirror image has the same pixels.
    gray = pillow_image(pixels).convert("L")
    small = gray.resize((_HASHED_SIDE, _HASHED_SIDE), Image.Resampling.LANCZOS)
    there, back = (int(str(imagehash.phash(side)), 16) for side in (small, ImageOps.mirror(small)))
    return there, back
