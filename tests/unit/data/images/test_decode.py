"""Pixels: as Pillow gives them, and an error of one type for all that is broken."""

import contextlib
import io
import zlib

import numpy as np
import pytest
import simplejpeg
from helpers.images import encoded, picture
from PIL import Image

from mae_vit.data.images import decode as module
from mae_vit.data.images.bands import read
from mae_vit.data.images.decode import DecodeError, decode, read_header


@pytest.mark.parametrize("kind", ["png", "bmp"])
@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (1, "L")])
def test_lossless_formats_are_exact(kind, channels, mode):
    pixels = decode(encoded(picture(), kind), channels)
    expected = np.asarray(picture().convert(mode)).reshape(30, 40, channels).transpose(2, 0, 1)
    np.testing.assert_array_equal(pixels, expected)
    assert pixels.dtype == np.uint8
    assert pixels.transpose(1, 2, 0).flags.c_contiguous  # as crops are fast of
    assert pixels.flags.writeable


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_is_as_pillow_decodes_it(mode, options):
    data = encoded(picture(mode=mode), "jpeg", quality=90, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1).astype(int)
    difference = np.abs(decode(data, 3) - expected)
    assert difference.max() <= 3
    header = read_header(data)
    assert (header.height, header.width, header.gray) == (30, 40, mode == "L")


def test_four_inks_of_either_kind_are_as_pillow_decodes_them():
    data = bytearray(encoded(picture(mode="CMYK"), "jpeg", quality=95))
    # Adobe's transform 2 reads the same numbers as YCCK; photographs of ImageNet are such.
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    data[at] = 2
    assert simplejpeg.decode_jpeg_header(bytes(data))[2] == "YCCK"
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(bytes(data), 3), expected)
    assert "CMYK to RGB" in read_header(bytes(data)).notes


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_has_the_size_that_its_header_says(orientation):
    data = encoded(picture(), "tiff", tiffinfo={0x0112: orientation})
    header = read_header(data)
    assert decode(data, 3).shape[1:] == (header.height, header.width)
    # Pillow has turned it: nothing is left to do.
    assert header.orientation == 1


def test_truncated_images_raise_at_every_length():
    for kind in ("jpeg", "png"):
        data = encoded(picture(), kind)
        for keep in range(0, len(data) - 20, 37):
            with pytest.raises(DecodeError):
                decode(data[:keep], 3)


def test_random_damage_never_raises_another_type():
    rng = np.random.default_rng(0)
    for kind in ("jpeg", "png", "webp"):
        data = encoded(picture(), kind)
        for _ in range(100):
            broken = bytearray(data)
            for place in rng.integers(0, len(data), 3):
                broken[place] = rng.integers(256)
            with contextlib.suppress(DecodeError):
                assert decode(bytes(broken), 3).dtype == np.uint8


def test_size_bound_is_read_from_the_header(monkeypatch):
    monkeypatch.setattr(module, "MAX_PIXELS", 40 * 30 - 1)
    for kind in ("jpeg", "png"):
        with pytest.raises(DecodeError, match="exceed the limit"):
            decode(encoded(picture(), kind), 3)


def test_a_png_that_was_changed_is_no_image():
    """Pillow alone shows some of these as another image."""
    chance = np.random.default_rng(0)
    # As small as CIFAR's, where the pixels are most of the file.
    pixels = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(pixels), "png")
    begin, end = data.index(b"IDAT") + 4, data.index(b"IEND") - 8
    refused = 0
    for place in range(begin, end):
        for value in (data[place] ^ 1, 0):
            changed = data[:place] + bytes([value]) + data[place + 1 :]
            if changed == data:
                continue
            refused += 1
            with pytest.raises(DecodeError):
                decode(changed, 3)
    assert refused > 300


def test_a_png_of_many_chunks_is_read(monkeypatch):
    image = picture()
    data = encoded(image, "png")
    text = b"\0\0\0\0tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big")
    many = data[:33] + 50 * text + data[33:]
    assert np.array_equal(decode(many, 3), decode(data, 3))
    monkeypatch.setattr(read, "_MAX_PNG_CHUNKS", 40)
    with pytest.raises(DecodeError, match="over 40 chunks"):
        decode(many, 3)
