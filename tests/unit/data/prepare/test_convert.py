"""Resizing, EXIF orientation, unusual images."""

import numpy as np
import pytest
from helpers.images import encoded, picture, write_files, write_tar
from PIL import Image

from mae_vit.core.preprocessing import Preprocessing
from mae_vit.data.images.decode import decode, read_header
from mae_vit.data.prepare.convert import Conversion, convert

# What a camera held this way stores, by EXIF orientation (the inverse of making it upright).
STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def photo(orientation: int, kind: str, mode: str = "RGB") -> tuple[Image.Image, bytes]:
    """An upright picture, and the file of a camera that was held another way."""
    upright = picture(3)
    turn = STORED_AS[orientation]
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return upright, encoded(stored.convert(mode), kind, exif=exif, quality=95)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "mode"), [("jpeg", "L"), ("jpeg", "CMYK"), ("png", "RGB"), ("webp", "RGB")])
def test_orientation_is_applied_or_ignored_alike_whatever_decodes(orientation, kind, mode):
    upright, data = photo(orientation, kind, mode)
    assert read_header(data).orientation == orientation
    channels = 1 if mode == "L" else 3
    expected = np.asarray(upright.convert("L" if mode == "L" else "RGB")).reshape(30, 40, channels)
    turned = convert(data, "x", Conversion(Preprocessing(exif_orientation="apply")))
    assert orientation == 1 or read_header(turned.data).orientation == 1
    pixels = decode(turned.data or data, channels).transpose(1, 2, 0).astype(int)
    assert pixels.shape == expected.shape
    # Coarse chroma; a picture turned wrongly is off by more than 50.
    assert np.abs(pixels - expected).mean() < 15
    kept = convert(data, "x", Conversion())
    assert kept.data is None
    assert ((kept.height, kept.width) == (40, 30)) == (orientation >= 5)
    assert any("EXIF" in note for note in kept.notes) == (orientation != 1)
    if (orientation, kind) == (6, "png"):  # it stays lossless
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage!", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_exif_is_no_orientation(kind, exif):
    assert read_header(encoded(picture(), kind, exif=exif)).orientation == 1


def test_only_larger_images_are_resized(call):
    big, tall, small = (encoded(picture(1, size), "png") for size in ((400, 300), (100, 203), (60, 500)))
    files = {"cat/big.png": big, "cat/tall.png": tall, "cat/small.png": small}
    result = call(files, options="--resize 60 --quality 80")
    images = result.images()
    assert images["cat/small"]["png"] == small
    assert decode(images["cat/tall"]["jpg"], 3).shape == (3, 122, 60)
    # Antialiased: as Pillow reduces it, within what JPEG loses.
    expected = np.asarray(picture(1, (400, 300)).resize((80, 60), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(decode(images["cat/big"]["jpg"], 3).transpose(1, 2, 0) - expected).mean() < 3
    split = result.dataset.splits["train"]
    assert (split.height, split.width, split.formats) == ((60, 500), (60, 80), {"jpg": 2, "png": 1})
    assert (split.processing.resize, split.processing.quality) == (60, 80)
    # Stripes of one pixel become gray, not one of the stripes.
    stripes = Image.fromarray(np.tile(np.array([0, 255], np.uint8), (120, 60)))
    pixels = decode(convert(encoded(stripes, "png"), "png", Conversion(Preprocessing(resize=40))).data, 1)
    assert 100 < pixels.min() <= pixels.max() < 155
    better = convert(big, "png", Conversion(Preprocessing(resize=60, quality=95)))
    assert len(better.data) > len(images["cat/big"]["jpg"])


def test_gray_images_stay_gray():
    image = convert(encoded(picture(mode="L"), "jpeg"), "jpg", Conversion(Preprocessing(resize=20)))
    assert image.gray
    assert read_header(image.data).gray
    assert image.total[0] == image.total[1] == image.total[2] == int(decode(image.data, 1).sum())


def test_what_decoding_changes_is_noted_once(call, said):
    deep = Image.fromarray((np.arange(1200, dtype=np.uint16) * 50).reshape(30, 40))
    frames = [picture(n) for n in range(3)]
    more = {"save_all": True, "append_images": frames[1:]}
    files = {
        "deep.png": encoded(deep, "png"),
        "ink.jpg": encoded(picture(mode="CMYK")),
        "ink2.jpg": encoded(picture(1, mode="CMYK")),
        "palette.png": encoded(picture().quantize(16), "png"),
        "glass.png": encoded(picture(mode="RGBA"), "png"),
        "moving.gif": encoded(frames[0], "gif", **more),
        "moving.webp": encoded(frames[0], "webp", lossless=True, **more),
        "moving.png": encoded(frames[0], "png", **more),
        "wrong.jpg": encoded(picture(), "png"),
        "plain.jpg": encoded(picture()),
    }
    refused, result = call(files), call(files, options="--take 8-bit")
    said(refused.text)
    said(result.text)
    images = result.images()
    assert images["wrong"] == {"png": files["wrong.jpg"]}
    assert images["deep"] == {"png": files["deep.png"]}
    np.testing.assert_array_equal(decode(files["deep.png"], 3)[1], np.asarray(deep) >> 8)
    for name in ("moving.webp", "moving.png"):
        np.testing.assert_array_equal(decode(files[name], 3).transpose(1, 2, 0), np.asarray(frames[0]))


def test_deep_images_that_were_reduced_to_8_bits_stay_so(tmp_path, call):
    deep = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
    shards = call({"deep.png": encoded(deep, "png")}, options="--take 8-bit", out="shards").out
    for options in ("--fraction 1", "--resize 16"):
        assert call(shards, options=f"{options} --overwrite").dataset.bands.photographs
    other = write_files(tmp_path / "other", {"photo.png": encoded(picture(), "png")})
    assert call(other, options=f"--exclude {shards}:train", out="other_out").code == 0
    write_tar(shards / "train-000000.tar", {"again.png": encoded(deep, "png")})
    assert call(shards, options="--in-place --overwrite").dataset.bands.photographs


def test_an_image_that_memory_does_not_hold_is_left_out(tmp_path, call, monkeypatch):
    def short_of_memory(data: bytes, channels: int, **options) -> np.ndarray:
        if read_header(data).height > 50:
            raise MemoryError
        return decode(data, channels, **options)

    monkeypatch.setattr("mae_vit.data.prepare.convert.decode", short_of_memory)
    files = {"c/1.jpg": encoded(picture(1, (40, 60))), "c/2.jpg": encoded(picture(2))}
    result = call(write_files(tmp_path / "src", files))
    assert "c/1.jpg" in result.text
    assert set(result.images()) == {"c/2"}
