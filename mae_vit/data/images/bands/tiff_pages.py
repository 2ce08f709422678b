"""Reads the directories of a TIFF file: what each page holds, and where its pixels lie."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from mae_vit.data.images.bounds import DecodeError

# More pages than bands are taken, since overviews lie between them.
MAX_PAGES = 2048
_MAX_TAGS = 512
_MAX_TEXT = 1 << 20
_MAGIC = {b"II*\0": ("<", False), b"MM\0*": (">", False), b"II+\0": ("<", True), b"MM\0+": (">", True)}
# Size and struct code of a tag's type; others are not needed here.
_TYPES = {1: (1, "B"), 2: (1, "s"), 3: (2, "H"), 4: (4, "I"), 16: (8, "Q")}
_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 254, 256, 257, 258, 259, 262
_DESCRIPTION, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES = 270, 273, 277, 278, 279
_PLANAR, _PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 284, 317, 322, 323, 324, 325
_EXTRA, _FORMAT, _FILL_ORDER, _ORIENTATION, _GDAL_METADATA, _GDAL_NODATA = 338, 339, 266, 274, 42112, 42113
_NEEDED = frozenset(
    (
        *(
            _SUBFILE,
            _WIDTH,
            _HEIGHT,
            _BITS,
            _COMPRESSION,
            _PHOTOMETRIC,
            _DESCRIPTION,
            _STRIPS,
            _SAMPLES,
            _ROWS,
        ),
        *(_STRIP_BYTES, _PLANAR, _PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _FORMAT),
        *(_FILL_ORDER, _ORIENTATION, _GDAL_METADATA, _GDAL_NODATA),
    )
)
_KINDS = {1: "uint", 2: "int", 3: "float", 4: "uint", 5: "complexint", 6: "complex"}
_IMAGEJ_IMAGES = re.compile(rb"^ImageJ=.{0,200}?^images=(\d{1,6})\s*$", re.DOTALL | re.MULTILINE)
_GDAL_NAME = re.compile(
    r'<Item name="DESCRIPTION" sample="(\d{1,4})" role="description">([^<]{1,200})</Item>'
)
_OME_NAME = re.compile(r'<Channel [^>]{0,2000}?\bName="([^"]{1,200})"')


@dataclass(frozen=True)
class Page:
    """One directory of a TIFF file.

    Attributes:
        number: place in the file.
        order: "<" or ">", of its bytes.
        reduced: it is an overview or a mask of another page.
        height: in pixels.
        width: in pixels.
        samples: values of a pixel.
        dtype: type of a value; a name such as "uint12" where NumPy has none.
        planar: samples lie in planes, not side by side.
        photometric: TIFF's number of the color space.
        compression: TIFF's number.
        predictor: TIFF's number.
        extra: meaning of each sample beyond the color space (1 and 2: transparency).
        block: (height, width) of strips or tiles.
        tiled: blocks are tiles.
        offsets: of the blocks.
        counts: of their bytes.
        plain: byte and bit order are the usual ones, so that blocks can be read here.
        oriented: it states an orientation other than upright.
        description: text.
        gdal_metadata: GDAL's XML.
        gdal_nodata: text of the value of missing pixels.
    """

    number: int
    order: str
    reduced: bool
    height: int
    width: int
    samples: int
    dtype: str
    planar: bool
    photometric: int
    compression: int
    predictor: int
    extra: tuple[int, ...]
    block: tuple[int, int]
    tiled: bool
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    plain: bool
    oriented: bool
    description: bytes
    gdal_metadata: bytes
    gdal_nodata: bytes

    @property
    def shape(self) -> tuple[int, int, int, str]:
        """Samples, height, width and type: pages of one stack have them in common."""
        return self.samples, self.height, self.width, self.dtype


def is_tiff(data: bytes) -> bool:
    """Whether bytes begin as TIFF files do."""
    return data[:4] in _MAGIC


class TiffPages:
    """Reads the pages of a file one after the other."""

    def __init__(self, data: bytes) -> None:
        """Reads the file's header.

        Raises:
            DecodeError: if there is none.
        """
        self._data = data
        self._order, self._big = _MAGIC[data[:4]]
        try:
            self._next: int = struct.unpack_from(
                self._order + ("Q" if self._big else "I"), data, 8 if self._big else 4
            )[0]
        except struct.error:
            raise DecodeError("the TIFF file is truncated") from None
        self._seen: set[int] = set()

    def read(self) -> Page | None:
        """Reads the next page; None after the last.

        Raises:
            DecodeError: if it is damaged.
        """
        at, number = self._next, len(self._seen)
        if not at:
            return None
        if at in self._seen or number >= MAX_PAGES:
            raise DecodeError(f"its TIFF directories form a circle, or are over {MAX_PAGES}")
        self._seen.add(at)
        try:
            tags = self._tags(at)
            return self._page(number, tags)
        except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
            if isinstance(error, DecodeError):
                raise
            raise DecodeError(f"TIFF directory {number} is damaged") from None

    def _tags(self, at: int) -> dict[int, tuple[int, ...] | bytes]:
        data, order, big = self._data, self._order, self._big
        count = struct.unpack_from(order + ("Q" if big else "H"), data, at)[0]
        if not 0 < count <= _MAX_TAGS:
            raise DecodeError(f"a TIFF directory of {count} tags")
        at += 8 if big else 2
        size, inline, entry = (20, 8, "HHQ8s") if big else (12, 4, "HHI4s")
        end = at + count * size
        self._next = struct.unpack_from(order + ("Q" if big else "I"), data, end)[0]
        tags: dict[int, tuple[int, ...] | bytes] = {}
        for tag, kind, number, value in struct.iter_unpack(order + entry, data[at:end]):
            if tag not in _NEEDED or kind not in _TYPES:
                continue
            width, code = _TYPES[kind]
            length = width * number
            if length > inline:
                place = struct.unpack_from(order + ("Q" if big else "I"), value)[0]
                if place + length > len(data):
                    raise DecodeError(f"tag {tag} of a TIFF directory lies beyond its end")
                if code == "s":
                    tags[tag] = data[place : place + min(length, _MAX_TEXT)]
                else:
                    tags[tag] = struct.unpack_from(f"{order}{number}{code}", data, place)
            elif code == "s":
                tags[tag] = value[:length]
            elif number:
                tags[tag] = struct.unpack_from(f"{order}{number}{code}", value)
        return tags

    def _page(self, number: int, tags: dict[int, tuple[int, ...] | bytes]) -> Page:
        def one(tag: int, default: int | None = None) -> int:
            values = tags.get(tag)
            if values is None:
                if default is None:
                    raise DecodeError(f"TIFF directory {number} lacks tag {tag}")
                return default
            return int(values[0])

        def many(tag: int) -> tuple[int, ...]:
            values = tags.get(tag, ())
            return () if isinstance(values, bytes) else values

        def text(tag: int) -> bytes:
            values = tags.get(tag, b"")
            return values if isinstance(values, bytes) else b""

        height, width, samples = one(_HEIGHT), one(_WIDTH), one(_SAMPLES, 1)
        tiled = _TILES in tags
        block = (one(_TILE_HEIGHT), one(_TILE_WIDTH)) if tiled else (min(one(_ROWS, height), height), width)
        return Page(
            number=number,
            order=self._order,
            reduced=bool(one(_SUBFILE, 0) & 0b101),
            height=height,
            width=width,
            samples=samples,
            dtype=_dtype(many(_BITS), many(_FORMAT)),
            planar=one(_PLANAR, 1) == 2 and samples > 1,
            photometric=one(_PHOTOMETRIC, 1),
            compression=one(_COMPRESSION, 1),
            predictor=one(_PREDICTOR, 1),
            extra=many(_EXTRA),
            block=block,
            tiled=tiled,
            offsets=many(_TILES if tiled else _STRIPS),
            counts=many(_TILE_BYTES if tiled else _STRIP_BYTES),
            plain=one(_FILL_ORDER, 1) == 1,
            oriented=one(_ORIENTATION, 1) != 1,
            description=text(_DESCRIPTION),
            gdal_metadata=text(_GDAL_METADATA),
            gdal_nodata=text(_GDAL_NODATA),
        )


def _dtype(bits: tuple[int, ...], formats: tuple[int, ...]) -> str:
    if len(set(bits)) > 1 or len(set(formats)) > 1:
        return "of different types"
    return f"{_KINDS.get(formats[0] if formats else 1, 'unknown')}{bits[0] if bits else 1}"


def imagej_images(page: Page) -> int:
    """Returns how many images ImageJ says that its file holds, which may lie behind one directory; else 1."""
    found = _IMAGEJ_IMAGES.search(page.description)
    return int(found[1]) if found else 1


def names_of(page: Page, count: int) -> tuple[str, ...]:
    """Returns the names of the bands that GDAL or OME wrote down; empty unless each band has one of its own."""
    names: dict[int, str] = {}
    if page.gdal_metadata:
        found = _GDAL_NAME.findall(page.gdal_metadata.decode("utf-8", "replace"))
        names = {int(number): name.strip() for number, name in found}
    elif b"<OME" in page.description:
        found = _OME_NAME.findall(page.description.decode("utf-8", "replace"))
        names = {number: name.strip() for number, name in enumerate(found)}
    values = tuple(names.get(number, "") for number in range(count))
    good = len(names) == count and all(values) and len(set(values)) == count
    return values if good and not any("," in value for value in values) else ()


def nodata_of(page: Page) -> float | None:
    """Returns the value of missing pixels that GDAL wrote down."""
    try:
        value = float(page.gdal_nodata.rstrip(b"\0 ").decode("ascii"))
    except ValueError:
        return None
    return value if value == value else None
