"""The pixels that training reads from the shards are those that an encoder is given of the user's own files."""

import numpy as np
import pytest
import torch
from helpers.encoders import encoder_file
from helpers.images import encoded, picture, write_files
from PIL import Image, ImageCms
from pydantic import ValidationError
from unit.data.band_files import chunky, dicom, npy, png, tiff, values

import mae_vit
from mae_vit.cli.main import main
from mae_vit.core.bands import RGB8
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.models.encoder_file import encoder_bytes, read_info
from mae_vit.weights.embed.images import open_images

SIDE = 16


def oriented(orientation: int, kind: str = "jpeg", mode: str = "RGB", **options) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(picture(orientation, (50, 36), mode), kind, exif=exif, **options)


def odd_photographs() -> dict[str, bytes]:
    """Photographs as people have them, small but for one."""
    rgba = picture(20, mode="RGBA")
    rgba.putalpha(Image.linear_gradient("L").resize(rgba.size))
    palette = picture(21).quantize(32)
    frames = [picture(number, mode="P") for number in range(3)]
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    return {
        **{f"turned{number}.jpg": oriented(number) for number in range(1, 9)},
        "turned_gray.jpg": oriented(6, mode="L"),
        "turned.png": oriented(8, "png"),
        "turned.webp": oriented(5, "webp"),
        "turned.tiff": oriented(6, "tiff"),
        "turned_cmyk.jpg": oriented(3, mode="CMYK"),
        "gray.jpg": encoded(picture(9, mode="L")),
        "gray_alpha.png": encoded(rgba.convert("LA"), "png"),
        "palette.png": encoded(palette, "png"),
        "palette_clear.png": encoded(palette, "png", transparency=3),
        "color_clear.png": encoded(picture(22), "png", transparency=(0, 0, 0)),
        "rgba.png": encoded(rgba, "png"),
        "rgba.webp": encoded(rgba, "webp", lossless=True),
        "cmyk.jpg": encoded(picture(23, mode="CMYK")),
        "bits.png": encoded(picture(24, mode="1"), "png"),
        "moving.gif": encoded(frames[0], "gif", save_all=True, append_images=frames[1:]),
        "progressive.jpg": encoded(picture(25, (61, 47)), progressive=True, quality=70, subsampling=2),
        "profile.jpg": encoded(picture(26), icc_profile=profile),
        "wide.png": encoded(picture(27, (220, 5)), "png"),
        "tall.jpg": encoded(picture(28, (30, 300))),
        "thin.png": encoded(picture(29, (1, 70)), "png"),
        "one.png": encoded(picture(30, (1, 1)), "png"),
        "plain.bmp": encoded(picture(31), "bmp"),
        "plain.tiff": encoded(picture(32), "tiff"),
        "plain.ppm": encoded(picture(33), "ppm"),
        "lossy.webp": encoded(picture(34, (90, 60)), "webp"),
        "named_wrong.png": encoded(picture(35)),
        "big.jpg": encoded(picture(36, (1800, 1200))),
    }


def prepare_and_read(tmp_path, files, options, channels):
    """Prepares files; returns what training reads of each, without augmentation, and an encoder of these data."""
    source, out = write_files(tmp_path / "files", files), tmp_path / "data"
    assert main(["prepare", str(source), str(out), "--workers", "0", *options]) == 0
    index = open_index(out, "train")
    augment = Augment(img_size=(SIDE, SIDE))
    training = open_source(index, "tar", channels=channels, augment=augment, memory_limit_gib=1.0)
    images = training.render(0, 0, np.arange(len(index))).images
    names = {name.rpartition(".")[0]: name for name in files}
    pixels = {names.get(key, key): image for key, image in zip(index.keys(), images, strict=True)}
    dataset = index.dataset
    path = encoder_file(
        tmp_path / "encoder.safetensors",
        in_chans=channels,
        mean=dataset.mean[:1] * channels if dataset.bands.photographs else dataset.mean,
        std=dataset.std[:1] * channels if dataset.bands.photographs else dataset.std,
        bands=dataset.bands,
        preprocessing=index.split_info.processing.of_images,
    )
    return pixels, mae_vit.load_encoder(path), source, out


def assert_the_same(pixels, encoder, source, files):
    assert sorted(pixels) == sorted(files)
    for name, data in files.items():
        for given in (data, source / name):
            np.testing.assert_array_equal(encoder.crop(given), pixels[name], err_msg=name)
        normalized = encoder.normalize(torch.from_numpy(pixels[name].copy())[None])[0]
        assert torch.equal(encoder.transform(data), normalized), name


UPRIGHT, SMALL = ["--exif-orientation", "apply"], ["--resize", "24"]


@pytest.mark.parametrize(
    ("options", "channels"),
    [
        ([], 1),
        (UPRIGHT, 3),
        ([*SMALL, "--quality", "50"], 1),
        ([*UPRIGHT, *SMALL], 3),
        (["--take", "8-bit", *UPRIGHT, *SMALL], 3),
    ],
)
def test_photographs_are_those_of_training(tmp_path, options, channels):
    # Keys go by the name alone.
    files = {f"{number:02d}_{name}": data for number, (name, data) in enumerate(odd_photographs().items())}
    if "--take" in options:  # else they are images of bands
        files |= {"deep.png": png(values(1, "uint16", high=65535)), "deep_rgb.png": png(values(3, "uint16"))}
    pixels, encoder, source, out = prepare_and_read(tmp_path, files, options, channels)
    assert_the_same(pixels, encoder, source, files)
    # Pillow decodes some JPEGs to other pixels than simplejpeg, and encodes a copy of it anew as PNG.
    for name in files:
        if name.endswith((".png", ".bmp", ".tiff", ".gif")) and "named" not in name:
            np.testing.assert_array_equal(encoder.crop(Image.open(source / name)), pixels[name], err_msg=name)
    # Of prepared data, which are read as they are.
    encoder.fit_bands(RGB8, "the data")
    for entry in open_images([str(out)], out=tmp_path).entries:
        name = next(name for name in files if name.rpartition(".")[0] == entry.key)
        np.testing.assert_array_equal(
            encoder.crop_pixels(encoder.decode(entry.read())), pixels[name], err_msg=name
        )


def with_gaps() -> np.ndarray:
    raw = values(5, "uint16")
    raw[1, 3:9, 5:20] = 7
    return raw


BANDS = {
    "5xuint16": {"tile.npy": npy(with_gaps()), "other.npy": npy(with_gaps()[::-1].transpose(1, 2, 0))},
    "5xuint16 ": {"pages.tif": tiff(with_gaps())},
    "4xuint8": {
        "color.tif": chunky(values(4, "uint8", high=255), photometric="rgb", extrasamples=["unassalpha"])
    },
    "5xfloat32": {"float.npy": npy(np.where(with_gaps() == 7, np.nan, with_gaps()).astype(np.float32))},
    "1xuint16": {"deep.png": png(values(1, "uint16")), "page.tif": tiff(values(1, "uint16")[0])},
    "1xint16": {"scan.dcm": dicom(values(1, "int16", low=-1000, high=900))},
}


OPTIONS = [
    [],
    ["--nodata", "7", "--resize", "24"],
    ["--window", "300,900", "--nodata", "7"],
    ["--scale", "0,10000"],
    ["--bands", "4,1"],
    ["--bands", "2-4", "--window", "300,900", "--resize", "24", "--nodata", "7"],
]
# Each kind with two of the options, each of the options with two kinds or more. Without an option that speaks of
# values, RGB and transparency are a photograph; of one band there is nothing to choose.
CASES = [
    *(("5xuint16", OPTIONS[number]) for number in (0, 1, 4, 5)),
    *(("5xuint16 ", OPTIONS[number]) for number in (2, 4)),
    *(("4xuint8", OPTIONS[number]) for number in (2, 3, 5)),
    *(("5xfloat32", OPTIONS[number]) for number in (0, 2)),
    *(("1xuint16", OPTIONS[number]) for number in (1, 3)),
    *(("1xint16", OPTIONS[number]) for number in (0, 2)),
]


@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_bands_are_those_of_training(tmp_path, kind, options):
    files = BANDS[kind]
    chosen = {"4,1": 2, "2-4": 3}.get(options[1]) if options else None
    pixels, encoder, source, out = prepare_and_read(tmp_path, files, options, chosen or int(kind[0]))
    assert_the_same(pixels, encoder, source, files)
    # An array of the chosen bands.
    for name in files:
        if name.endswith(".npy"):
            raw = np.load(source / name)
            raw = raw if len(raw) == 5 else raw.transpose(2, 0, 1)
            raw = raw if chosen is None else raw[[3, 0] if chosen == 2 else slice(1, 4)]
            for array in (raw, torch.from_numpy(raw)):
                np.testing.assert_array_equal(encoder.crop(array), pixels[name])
    encoder.fit_bands(encoder.input.bands, "the data")
    for entry in open_images([str(out)], out=tmp_path).entries:
        name = next(name for name in files if name.rpartition(".")[0] == entry.key)
        cropped = encoder.crop_pixels(encoder.decode(entry.read()))
        np.testing.assert_array_equal(cropped, pixels[name], err_msg=name)


def test_the_record_is_in_the_encoders_file_only_where_something_was_done(tmp_path):
    how = Preprocessing(resize=24, quality=90, exif_orientation="apply", bands=("3", "red"), window=(-2.5, 7))
    path = encoder_file(tmp_path / "encoder.safetensors", preprocessing=how)
    assert read_info(path).preprocessing == how
    assert mae_vit.load_encoder(path).input.preprocessing == how
    plain = read_info(encoder_file(tmp_path / "plain.safetensors"))
    assert plain.preprocessing == UNCHANGED
    assert b"preprocessing" not in encoder_bytes(plain.geometry.build(), plain)
    for broken in (
        {"resize": 0},
        {"window": [1, "x"]},
        {"window": [0, float("inf")]},
        {"turned": 1},
        [1],
        "x",
    ):
        with pytest.raises(ValidationError):
            Preprocessing.of_entry({"preprocessing": broken})
