"""Damaged TIFF, NPY and DICOM files: a DecodeError or an image, soon, and in little memory."""

import contextlib
import io
import pickle
import time
import tracemalloc
import warnings
from typing import ClassVar

import numpy as np
import pytest
from unit.data.band_files import BandFile, make_files, npy

from mae_vit.core.bands import DTYPES
from mae_vit.data.images import bounds
from mae_vit.data.images import decode as decoding
from mae_vit.data.images.bands.read import open_raster
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.images.decode import decode, read_header

# 60,000 pixels, and images of 180 KB.
MAX_PIXELS = 60_000
MAX_BYTES = 24 << 20
MAX_SECONDS = 5
FORMATS = ("tif", "npy", "npz", "dcm")


def originals(extension: str) -> list[BandFile]:
    return [file for file in make_files() if file.extension == extension and len(file.data) < 120_000]


@pytest.fixture(autouse=True)
def low_bound(monkeypatch):
    for module in (bounds, decoding):
        monkeypatch.setattr(module, "MAX_PIXELS", MAX_PIXELS)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Changes a file in one of the ways in which files are damaged, or hostile."""
    array, way = bytearray(data), rng.integers(5)
    if way == 0:
        return bytes(array[: rng.integers(len(array))])
    # Headers lie at the beginning, directories of TIFF files often at the end.
    head = min(len(array), 600)
    for _ in range(rng.integers(1, 12)):
        at = int(rng.integers(head) if rng.random() < 0.7 else rng.integers(len(array)))
        if way == 1:
            array[at] ^= 1 << rng.integers(8)
        elif way == 2:
            array[at] = rng.choice([0, 1, 127, 128, 255])
        elif way == 3:
            array[at : at + 4] = (
                rng.choice([0, 0x7FFFFFFF, 0xFFFFFFFF, 65536, 1 << 30]).astype("<u4").tobytes()
            )
        else:
            del array[at : at + int(rng.integers(1, 40))]
    return bytes(array)


def try_to_read(data: bytes) -> str:
    """Reads a file in all ways in which prepare and the loader do; returns what came of it."""
    outcome = "read"
    for every_band in (False, True):
        try:
            raster = open_raster(data, every_band=every_band)
            if raster is None:
                continue
            pixels = raster.pixels
            assert pixels.ndim == 3
            assert pixels.dtype.name in DTYPES
            assert pixels.nbytes <= 3 * MAX_PIXELS
        except DecodeError as error:
            outcome = str(error)
            assert outcome
            assert "\n" not in outcome
    for read in (lambda: decode(data, 3), lambda: read_header(data)):
        with contextlib.suppress(DecodeError):
            read()
    return outcome


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_damaged_files_are_named_soon_and_in_little_memory(extension, count):
    rng, files, outcomes = np.random.default_rng(FORMATS.index(extension)), originals(extension), set()
    for number in range(count):
        file = files[number % len(files)]
        data = damaged(file.data, rng)
        begun = time.process_time()
        tracemalloc.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = try_to_read(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES, (file.name, number, outcome, peak)
        assert time.process_time() - begun < MAX_SECONDS, (file.name, number)
        outcomes.add(outcome)
    assert len(outcomes) > (1 if count == 10 else 3)


class Trap:
    """Tells when it is unpickled."""

    sprung: ClassVar[list[bool]] = []

    def __reduce__(self):
        return (Trap.sprung.append, (True,))


@pytest.mark.parametrize("wrap", ["npy", "npz", "pickle", "member"])
def test_pickles_are_never_loaded(wrap):
    array = np.array([[Trap()]], object)
    stream = io.BytesIO()
    if wrap == "npy":
        stream.write(npy(array, allow_pickle=True))
    elif wrap == "npz":
        np.savez(stream, a=array)
    elif wrap == "member":
        np.savez(stream, image=array, other=np.zeros(3))
    else:
        stream.write(pickle.dumps(array))
    for read in (lambda data: decode(data, 3), read_header):
        with pytest.raises(DecodeError, match=r"objects|image"):
            read(stream.getvalue())
    if wrap == "pickle":
        assert open_raster(stream.getvalue()) is None
    else:
        with pytest.raises(DecodeError, match="Python objects"):
            open_raster(stream.getvalue())
    assert not Trap.sprung


def test_a_directory_that_leads_to_itself():
    file = next(file for file in make_files() if file.name == "TIFF, gray uint16")
    data = bytearray(file.data)
    at = int.from_bytes(data[4:8], "little")
    count = int.from_bytes(data[at : at + 2], "little")
    data[at + 2 + 12 * count : at + 6 + 12 * count] = at.to_bytes(4, "little")
    with pytest.raises(DecodeError, match="form a circle"):
        open_raster(bytes(data))


def test_the_bound_of_pixels_holds_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_PIXELS", 100)
    for extension in ("npy", "tif", "dcm"):
        file = next(file for file in originals(extension) if file.kind == "1xuint16" or extension == "npy")
        with pytest.raises(DecodeError, match=r" of 100$"):
            open_raster(file.data)
