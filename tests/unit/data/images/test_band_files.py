"""Each kind of file is read to the value, or refused by a line that says why."""

import io
import tracemalloc
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest
import tifffile
from unit.data.band_files import make_files, npy, planes, tiff, values

from mae_vit.data.images.bands.read import open_raster
from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.prepare.convert import Conversion, convert, convert_chunk

FILES = make_files()


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.kind is not None], ids=lambda file: file.name
)
def test_taken(file):
    image = convert_chunk([(file.data, file.extension)], Conversion())[0]
    assert not isinstance(image, str), image
    assert image.kind == file.kind
    assert image.extension == (file.written or (file.extension if file.kind == "8-bit" else "npy"))
    stored = image.data or file.data
    pixels = decode(stored, len(file.pixels)) if file.kind == "8-bit" else open_raster(stored).pixels
    assert pixels.dtype == file.pixels.dtype
    np.testing.assert_array_equal(pixels, file.pixels)


@pytest.mark.parametrize("file", [file for file in FILES if file.kind is None], ids=lambda file: file.name)
def test_refused(file, said):
    with pytest.raises(DecodeError) as error:
        convert(file.data, file.extension, Conversion())
    said(error)


def test_names_and_missing_values_of_files():
    gdal, ome = (
        next(open_raster(file.data) for file in FILES if word in file.name) for word in ("GDAL", "OME")
    )
    assert (gdal.names, gdal.nodata) == (("B4", "B3", "B2"), 0.0)
    assert (ome.names, ome.nodata) == (("DAPI", "GFP"), None)


def test_photographs_of_bands_are_not_cut_to_rgb():
    """Pillow would give the first three bands, or the first page."""
    for file in FILES:
        if file.extension == "tif" and file.kind in ("4xuint8", "4xuint16", "13xuint8"):
            with pytest.raises(DecodeError, match=file.kind):
                decode(file.data, 3)


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}, {"byteorder": ">"}], ids=str)
def test_16_bits_are_reduced_however_they_are_stored(options):
    """Pillow misreads planes, and white as zero."""
    wide = values(4, "uint16", 0, 65535)
    upper, gray, tags = (
        wide[:3] >> 8,
        tiff(wide[0], photometric="miniswhite", **options),
        (274, "H", 1, 6, True),
    )
    clear = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
    for data in (planes(wide[:3], photometric="rgb", **options), planes(wide, **clear, **options)):
        np.testing.assert_array_equal(decode(data, 3), upper)
    turned = planes(wide[:3], photometric="rgb", extratags=[tags], **options)
    np.testing.assert_array_equal(decode(turned, 3), np.rot90(upper, -1, axes=(1, 2)))
    if "byteorder" not in options:  # of these Pillow does not read the header
        np.testing.assert_array_equal(decode(gray, 1), (65535 - wide[:1]) >> 8)


def test_photographs_of_dicom_are_8_bit():
    for file in FILES:
        if file.extension == "dcm" and file.kind == "8-bit":
            taken, default = (convert(file.data, "dcm", Conversion(take=take)) for take in ("8-bit", None))
            assert taken == default


def npz_bomb(pixels: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros((1, 32, 32), np.uint16)) + pixels)
    return stream.getvalue()


def tiff_bomb(pixels: bytes) -> bytes:
    stream = io.BytesIO()
    options = {"shape": (32, 32), "dtype": np.uint16, "photometric": "minisblack", "compression": "zlib"}
    tifffile.imwrite(stream, iter([zlib.compress(pixels)]), **options)
    return stream.getvalue()


@pytest.mark.parametrize("bomb", [npz_bomb, tiff_bomb])
def test_no_more_is_unpacked_than_declared(bomb):
    """A file of a few KB whose pixels unpack to 64 MB, of which its header declares 2 KB."""
    data = bomb(bytes(64 << 20))
    assert len(data) < 1 << 17
    tracemalloc.start()
    with suppress(DecodeError):
        assert open_raster(data).pixels.shape == (1, 32, 32)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
