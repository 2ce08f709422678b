"""Masks: what counts as one, and how they are cut."""

import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.images import encoded
from PIL import Image

from mae_vit.data.images.augment import crop_mask
from mae_vit.data.images.decode import DecodeError, decode_mask

IDS = np.arange(48).reshape(6, 8) % 7


def with_palette() -> Image.Image:
    image = Image.fromarray(IDS.astype(np.uint8), "P")
    image.putpalette([200 - 3 * n for n in range(30)])
    return image


@pytest.mark.parametrize(
    ("image", "scale"),
    [
        (Image.fromarray(IDS.astype(np.uint8)), 1),
        (Image.fromarray((IDS * 9000).astype(np.uint16)), 9000),
        (with_palette(), 1),
    ],
    ids=["gray", "16 bits", "palette"],
)
def test_ids_are_read_as_they_are(image, scale):
    mask = decode_mask(encoded(image, "png"))
    assert mask.dtype == np.uint16
    np.testing.assert_array_equal(mask, IDS * scale)


def test_a_palette_of_few_colors_is_read_too():
    """Such PNGs have 1, 2 or 4 bits a pixel."""
    for bits in (1, 2, 4):
        ids = (IDS % 2**bits).astype(np.uint8)
        image = Image.fromarray(ids, "P")
        image.putpalette(list(range(3 * 2**bits)))
        np.testing.assert_array_equal(decode_mask(encoded(image, "png", bits=bits)), ids)


def gray_of_two_bits() -> bytes:
    """Pillow does not write such a PNG: one of 8 bits with another depth in its header, and fewer bytes a line."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 4, 1, 2, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0\x1b"))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(np.zeros((4, 4, 3), np.uint8)), "png"),
        encoded(Image.fromarray(IDS.astype(np.uint8)), "jpeg"),
        gray_of_two_bits(),
    ],
    ids=["colors", "JPEG", "2 bits"],
)
def test_anything_else_is_refused(data, said):
    with pytest.raises(DecodeError) as error:
        decode_mask(data)
    said(error)
    with pytest.raises(DecodeError, match=r"trunc|broken|incomplete"):
        decode_mask(encoded(Image.fromarray(IDS.astype(np.uint8)), "png")[:-40])


def test_the_nearest_pixel_is_that_of_torch():
    rng = np.random.default_rng(0)
    for height, width in ((5, 7), (16, 3), (24, 24)):
        mask = rng.integers(0, 9, (20, 30)).astype(np.uint16)
        box = (2, 3, 15, 21)
        expected = F.interpolate(
            torch.from_numpy(mask[2:17, 3:24].astype(np.float32))[None, None],
            (height, width),
            mode="nearest-exact",
        )
        np.testing.assert_array_equal(crop_mask(mask, box, False, (height, width)), expected[0, 0].numpy())
        np.testing.assert_array_equal(
            crop_mask(mask, box, True, (height, width)), expected[0, 0].numpy()[:, ::-1]
        )
