"""Resizing, EXIF orientation, unusual images, and the processes that do it."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from helpers.images import encoded, picture, read_back, write_files
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.data.images.decode import DecodeError, decode, read_header
from mae_vit.data.prepare.convert import Conversion, convert
from mae_vit.data.prepare.convert_pool import ConverterPool
from mae_vit.data.shards.dataset_json import read_dataset

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
@pytest.mark.parametrize(
    ("kind", "mode"), [("jpeg", "RGB"), ("jpeg", "L"), ("jpeg", "CMYK"), ("png", "RGB"), ("webp", "RGB")]
)
def test_orientation_is_applied_or_ignored_alike_whatever_decodes(orientation, kind, mode):
    upright, data = photo(orientation, kind, mode)
    assert read_header(data).orientation == orientation
    channels = 1 if mode == "L" else 3
    expected = np.asarray(upright.convert("L" if mode == "L" else "RGB")).reshape(30, 40, channels)
    turned = convert(data, "x", Conversion(upright=True))
    if orientation != 1:
        assert read_header(turned.data).orientation == 1
        assert "turned upright" in turned.notes
    pixels = decode(turned.data or data, channels).transpose(1, 2, 0).astype(int)
    assert pixels.shape == expected.shape
    # Coarse chroma; a picture turned wrongly is off by more than 50.
    assert np.abs(pixels - expected).mean() < 15
    kept = convert(data, "x", Conversion())
    assert kept.data is None
    assert ((kept.height, kept.width) == (40, 30)) == (orientation >= 5)
    assert any("EXIF orientation, which is ignored" in note for note in kept.notes) == (orientation != 1)


def test_a_turned_png_stays_lossless():
    upright, data = photo(6, "png")
    turned = convert(data, "png", Conversion(upright=True))
    assert turned.extension == "png"
    np.testing.assert_array_equal(decode(turned.data, 3).transpose(1, 2, 0), np.asarray(upright))


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage!", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_exif_is_no_orientation(kind, exif):
    assert read_header(encoded(picture(), kind, exif=exif)).orientation == 1


def test_the_command_turns_or_keeps_the_bytes(tmp_path, capsys):
    files = {f"cat/{number}.jpg": photo(number, "jpeg")[1] for number in (1, 6)}
    source = write_files(tmp_path / "src", files)
    assert main(["prepare", str(source), str(tmp_path / "kept")]) == 0
    assert {key: sample["jpg"] for key, sample in read_back(tmp_path / "kept").items()} == {
        name[:-4]: data for name, data in files.items()
    }
    assert "images: 1 with an EXIF orientation, which is ignored" in capsys.readouterr().out
    assert main(["prepare", str(source), str(tmp_path / "turned"), "--exif-orientation", "apply"]) == 0
    turned = read_back(tmp_path / "turned")
    assert turned["cat/1"]["jpg"] == files["cat/1.jpg"]
    assert decode(turned["cat/6"]["jpg"], 3).shape == (3, 30, 40)
    dataset = read_dataset(tmp_path / "turned").splits["train"]
    assert (dataset.height, dataset.width) == ((30, 30), (40, 40))
    assert (dataset.processing.exif_orientation, dataset.processing.quality) == ("apply", 90)


def test_only_larger_images_are_resized(tmp_path):
    big, tall, small = (encoded(picture(1, size), "png") for size in ((400, 300), (100, 203), (60, 500)))
    source = write_files(tmp_path / "src", {"cat/big.png": big, "cat/tall.png": tall, "cat/small.png": small})
    out = tmp_path / "out"
    assert main(["prepare", str(source), str(out), "--resize", "60", "--quality", "80"]) == 0
    found = read_back(out)
    assert found["cat/small"]["png"] == small
    assert decode(found["cat/big"]["jpg"], 3).shape == (3, 60, 80)
    assert decode(found["cat/tall"]["jpg"], 3).shape == (3, 122, 60)
    # Antialiased: as Pillow reduces it, within what JPEG loses.
    expected = np.asarray(picture(1, (400, 300)).resize((80, 60), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(decode(found["cat/big"]["jpg"], 3).transpose(1, 2, 0) - expected).mean() < 3
    split = read_dataset(out).splits["train"]
    assert (split.height, split.width) == ((60, 500), (60, 80))
    assert (split.processing.resize, split.processing.quality) == (60, 80)
    assert split.formats == {"jpg": 2, "png": 1}
    # Stripes of one pixel become gray, not one of the stripes.
    stripes = Image.fromarray(np.tile(np.array([0, 255], np.uint8), (120, 60)))
    pixels = decode(convert(encoded(stripes, "png"), "png", Conversion(resize=40)).data, 1)
    assert 100 < pixels.min() <= pixels.max() < 155
    better = convert(big, "png", Conversion(resize=60, quality=95))
    assert len(better.data) > len(found["cat/big"]["jpg"])


def test_gray_images_stay_gray():
    image = convert(encoded(picture(mode="L"), "jpeg"), "jpg", Conversion(resize=20))
    assert image.gray
    assert read_header(image.data).gray
    assert image.total[0] == image.total[1] == image.total[2] == int(decode(image.data, 1).sum())


def test_what_decoding_changes_is_said_once(tmp_path, capsys):
    deep = Image.fromarray((np.arange(1200, dtype=np.uint16) * 50).reshape(30, 40))
    frames = [picture(n) for n in range(3)]
    files = {
        "deep.png": encoded(deep, "png"),
        "ink.jpg": encoded(picture(mode="CMYK")),
        "ink2.jpg": encoded(picture(1, mode="CMYK")),
        "palette.png": encoded(picture().quantize(16), "png"),
        "glass.png": encoded(picture(mode="RGBA"), "png"),
        "moving.gif": encoded(frames[0], "gif", save_all=True, append_images=frames[1:]),
        "moving.webp": encoded(frames[0], "webp", save_all=True, append_images=frames[1:], lossless=True),
        "moving.png": encoded(frames[0], "png", save_all=True, append_images=frames[1:]),
        "wrong.jpg": encoded(picture(), "png"),
        "plain.jpg": encoded(picture()),
    }
    source = write_files(tmp_path / "src", files)
    out = tmp_path / "out"
    assert main(["prepare", str(source), str(out)]) == 2
    assert "deep.png is 1xuint16, others are 8-bit: --take 8-bit" in capsys.readouterr().err
    assert main(["prepare", str(source), str(out), "--take", "8-bit"]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("images: ")]
    for part in (
        "1 of 16 bits scaled to 8",
        "2 CMYK to RGB",
        "3 animated, first frame taken",
        "1 transparent, made opaque",
        "1 named as another format",
    ):
        assert part in said
    found = read_back(out)
    assert found["wrong"] == {"png": files["wrong.jpg"]}
    assert found["deep"] == {"png": files["deep.png"]}
    np.testing.assert_array_equal(decode(files["deep.png"], 3)[1], np.asarray(deep) >> 8)
    for name in ("moving.webp", "moving.png"):
        np.testing.assert_array_equal(decode(files[name], 3).transpose(1, 2, 0), np.asarray(frames[0]))
    assert main(["check", str(out), "--decode"]) == 0


def test_deep_color_is_scaled_and_deeper_is_refused(tmp_path):
    wide = np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40)
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(wide), "tiff"), 1)[0], wide >> 8)
    for pixels in (wide.astype(np.int32) * 70000, wide.astype(np.float32)):
        with pytest.raises(DecodeError, match=r"its values are int32|its values are float32|floating-point"):
            decode(encoded(Image.fromarray(pixels), "tiff"), 3)


def test_an_image_that_memory_does_not_hold_is_left_out(tmp_path, capsys, monkeypatch):
    def short_of_memory(data: bytes, channels: int, **options) -> np.ndarray:
        if read_header(data).height > 50:
            raise MemoryError
        return decode(data, channels, **options)

    monkeypatch.setattr("mae_vit.data.prepare.convert.decode", short_of_memory)
    files = {
        "c/1.jpg": encoded(picture(1, (40, 60))),
        "c/2.jpg": encoded(picture(2)),
        "d/3.jpg": encoded(picture(3)),
    }
    source = write_files(tmp_path / "src", files)
    assert main(["prepare", str(source), str(tmp_path / "out"), "--workers", "0"]) == 0
    assert "c/1.jpg: takes more memory than there is" in capsys.readouterr().out
    assert set(read_back(tmp_path / "out")) == {"c/2", "d/3"}


@pytest.fixture
def many(tmp_path):
    files = {f"c{n % 3}/{n}.jpg": encoded(picture(n, (50 + n % 7, 40))) for n in range(700)}
    return write_files(tmp_path / "src", files | {"c0/broken.jpg": b"\xff\xd8\xff\xe0 no"})


def test_processes_write_the_same_bytes(many, tmp_path, capsys):
    for workers in ("0", "2"):
        out = str(tmp_path / workers)
        assert main(["prepare", str(many), out, "--workers", workers, "--resize", "32"]) == 0
        assert "left out 1 unreadable" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert names == ["dataset.json", "train-000000.tar", "train-index.npy"]
    for name in names:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_results_come_in_order_and_are_read_ahead_in_bounds():
    read = []

    def images():
        for number in range(3000):
            read.append(number)
            yield number, encoded(picture(number % 5, (8, 8)), "bmp"), "bmp"

    with ConverterPool(Conversion(), 1) as pool:
        results = pool.run(images(), 3000)
        assert next(results)[0] == 0
        assert len(read) < 1500
        assert [number for number, _, _ in results] == list(range(1, 3000))


def test_processes_go_when_their_parent_is_killed(many, tmp_path):
    command = [
        sys.executable,
        "-m",
        "mae_vit.cli.main",
        "prepare",
        str(many),
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [*command, "--shard-samples", "1"],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )

    def group() -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            try:
                if os.getpgid(one.pid) == process.pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return found

    deadline = time.monotonic() + 500
    # The command, the tracker of its semaphores, two workers.
    while len(group()) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(group()) == 4
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 500
    while group() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group() == []
