"""prepare: what is written, that others can read it, and that nothing is half-written."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from helpers.images import encoded, picture, write_files
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.data.images.decode import decode
from mae_vit.data.shards.dataset_json import read_dataset


def jpeg(seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> bytes:
    rng = np.random.default_rng(seed)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(stream, "jpeg", quality=90)
    return stream.getvalue()


@pytest.fixture
def tree(tmp_path) -> dict[str, bytes]:
    """Two splits of three classes under one top folder, with names that need care."""
    files = {}
    for split, count in (("train", 7), ("test", 3)):
        for number, name in enumerate(("cat", "dog.wild", "eel")):
            for image in range(count):
                files[f"{split}/{name}/{image:03d}.v1.jpg"] = jpeg(
                    100 * number + image + (50 if split == "test" else 0)
                )
    files["train/cat/000.v1.png"] = png_bytes()  # the same stem as a jpg
    for path, data in files.items():
        target = tmp_path / "src" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (tmp_path / "src" / "README.txt").write_text("not an image")
    return files


def png_bytes() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 10), (10, 20, 30)).save(stream, "png")
    return stream.getvalue()


def pack(source: Path, archive: Path, mode: str, **options) -> Path:
    with tarfile.open(archive, mode, **options) as tar:
        tar.add(source, arcname="top")
    return archive


def read_back(out: Path, split: str) -> dict[str, tuple[bytes, int]]:
    """Every sample through webdataset: key -> (image bytes, class)."""
    shards = sorted(str(path) for path in out.glob(f"{split}-*.tar"))
    found = {}
    for sample in wds.WebDataset(shards, shardshuffle=False):
        extension = next(key for key in sample if key in ("jpg", "png"))
        assert sample["__key__"] not in found
        found[sample["__key__"]] = (sample[extension], int(sample["cls"]))
    return found


def test_webdataset_reads_the_same_bytes_and_classes(tree, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["prepare", str(tmp_path / "src"), str(out), "--shard-samples", "5"]) == 0
    dataset = read_dataset(out)
    assert dataset.classes == ["cat", "dog.wild", "eel"]
    for split in ("train", "test"):
        expected = sorted(
            (data, dataset.classes.index(path.split("/")[1]))
            for path, data in tree.items()
            if path.startswith(split)
        )
        found = read_back(out, split)
        assert sorted(found.values()) == expected
        assert len(dataset.splits[split].shards) == -(-len(expected) // 5)
    assert "dog.wild/000_v1" in read_back(out, "train")
    assert "ignored 1 file (no images)" in capsys.readouterr().out


def test_equal_sources_give_equal_bytes(tree, tmp_path):
    for name in ("a", "b"):
        assert main(["prepare", str(tmp_path / "src"), str(tmp_path / name)]) == 0
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_statistics_are_those_of_the_pixels(tree, tmp_path):
    out = tmp_path / "out"
    assert main(["prepare", str(tmp_path / "src"), str(out)]) == 0
    pixels = [decode(data, 3).reshape(3, -1) / 255 for path, data in tree.items() if path.startswith("train")]
    dataset = read_dataset(out)
    np.testing.assert_allclose(dataset.mean, np.concatenate(pixels, axis=1).mean(axis=1), atol=2e-6)
    np.testing.assert_allclose(dataset.std, np.concatenate(pixels, axis=1).std(axis=1), atol=2e-6)
    assert dataset.statistics_images == 22
    info = dataset.splits["train"]
    assert (info.height, info.width, info.samples) == ((10, 10), (12, 12), 22)
    assert info.formats == {"jpg": 21, "png": 1}
    assert info.class_counts == [8, 7, 7]


def test_shards_mix_the_classes(digits):
    labels = [label for _, label in read_back(digits, "train").values()][:100]
    assert len(set(labels)) == 10
    assert max(labels.count(label) for label in set(labels)) < 25


def test_gray_images_have_one_channel(digits):
    dataset = read_dataset(digits)
    assert (dataset.channels, len(dataset.mean)) == (1, 1)
    assert dataset.splits["train"].samples + dataset.splits["test"].samples == 1797


def test_a_later_call_adds_a_split_with_the_same_classes(tree, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["prepare", str(tmp_path / "src" / "train"), str(out)]) == 0
    first = read_dataset(out)
    test = tmp_path / "src" / "test"
    for name in ("cat", "eel"):  # a split may lack classes
        for path in (test / name).iterdir():
            path.unlink()
    assert main(["prepare", str(test), str(out), "--split", "test"]) == 0
    both = read_dataset(out)
    assert set(both.splits) == {"train", "test"}
    assert both.splits["train"] == first.splits["train"]
    assert both.mean == first.mean
    assert both.splits["test"].class_counts == [0, 3, 0]
    assert main(["prepare", str(test), str(out), "--split", "test"]) == 2
    assert 'already has split "test": --overwrite replaces it' in capsys.readouterr().err
    assert main(["prepare", str(test), str(out), "--split", "test", "--overwrite"]) == 0


BAD = {
    "missing source": (["nowhere"], "source nowhere does not exist; known: cifar10"),
    "misspelled source": (["{tmp}/mixd"], '/mixed"?'),
    "misspelled folder": (["{tmp}/mixd/train"], "mixd/train does not exist; known: cifar10"),
    "misspelled name": (["digit"], 'did you mean "digits"?'),
    "a file": (["{src}/README.txt"], "a list of images is read as a CSV or TSV"),
    "no images": (["{tmp}/empty"], "holds no images"),
    "some in no class folder": (["{tmp}/mixed"], 'the image "2.png" lies in no class folder'),
    "no readable image": (["{tmp}/unread"], 'no image of split "train" can be read: 1.jpg: not an image'),
    "one split twice": (["{src}", "{src}"], 'split "test" comes from both'),
    "damaged archive": (["{tmp}/broken.tar"], "is damaged"),
    "damaged gzip": (["{tmp}/broken.tar.gz"], "broken.tar.gz is damaged: bad header"),
    "damaged inside of a gzip": (["{tmp}/inside.tar.gz"], "cannot be decompressed: Error -3"),
    "no tar in a gzip": (
        ["{tmp}/no_tar.tar.gz"],
        "no_tar.tar.gz is damaged: bad header checksum at offset 0",
    ),
    "folder not in UTF-8": (["{tmp}/latin"], r"the class folder caf\xe9 is not named in UTF-8"),
    "no output": ([], "needs sources and an output folder"),
    "shard size": (["{src}", "--shard-mib", "0"], "--shard-mib 0: at least 1"),
    "a root of no download": (
        ["{src}", "--root", "{tmp}"],
        "--root changes nothing: no source is cifar10 or",
    ),
    "a split of what has its own": (
        ["digits", "--split", "x"],
        "--split changes nothing: digits has splits of",
    ),
    "no copy of cifar10": (["cifar10", "--root", "{tmp}/none"], "cifar10: no copy under"),
    "no network for cifar10": (["cifar10"], "cifar10: no copy under"),
}


def test_a_split_that_was_prepared_otherwise_is_said(tmp_path, capsys):
    write_files(tmp_path / "photos", {f"{n}.jpg": encoded(picture(n)) for n in range(4)})
    source, out = str(tmp_path / "photos"), str(tmp_path / "out")
    assert main(["prepare", source, out, "--resize", "16"]) == 0
    assert main(["prepare", source, out, "--split", "val"]) == 0
    expected = "warning: val was prepared otherwise than train: resize None and not 16"
    assert expected in capsys.readouterr().out
    assert main(["prepare", source, out, "--split", "val", "--resize", "16", "--overwrite"]) == 0
    assert "otherwise" not in capsys.readouterr().out


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_writes_nothing(tree, tmp_path, capsys, name, monkeypatch):
    if name.endswith("cifar10"):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed" / "cat").mkdir(parents=True)
    (tmp_path / "mixed" / "cat" / "1.png").write_bytes(png_bytes())
    (tmp_path / "mixed" / "2.png").write_bytes(png_bytes())
    write_files(tmp_path / "unread", {"1.jpg": b"text"})
    (tmp_path / "broken.tar").write_bytes(b"x" * 2000)
    (tmp_path / "broken.tar.gz").write_bytes(b"x" * 2000)
    # A gzip header, and then no valid block: zlib's error, not gzip's.
    (tmp_path / "inside.tar.gz").write_bytes(gzip.compress(b"")[:10] + b"\xff" * 2000)
    (tmp_path / "no_tar.tar.gz").write_bytes(gzip.compress(b"x" * 2000))
    latin = os.fsencode(tmp_path) + b"/latin/caf\xe9"
    os.makedirs(latin)
    with open(latin + b"/1.png", "wb") as file:
        file.write(png_bytes())
    arguments, expected = BAD[name]
    arguments = [part.format(src=tmp_path / "src", tmp=tmp_path) for part in arguments]
    assert main(["prepare", *arguments, str(tmp_path / "out" / "deep")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert expected in lines[-1]
    assert lines[-1].startswith("mae-vit: error: ")
    assert not (tmp_path / "out").exists()


def test_shards_of_others_are_not_replaced(tree, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-000000.tar").write_bytes(b"precious")
    assert main(["prepare", str(tmp_path / "src"), str(out)]) == 2
    assert "train-000000.tar is not described by dataset.json" in capsys.readouterr().err
    assert (out / "train-000000.tar").read_bytes() == b"precious"
    assert main(["prepare", str(tmp_path / "src"), str(out), "--overwrite"]) == 0


def test_shards_left_by_a_kill_while_moving_are_replaced(tree, tmp_path):
    out = tmp_path / "out"
    (out / ".train.partial").mkdir(parents=True)
    (out / "train-000000.tar").write_bytes(b"half of an earlier call")
    assert main(["prepare", str(tmp_path / "src"), str(out)]) == 0
    assert main(["check", str(out)]) == 0


def test_a_file_not_named_in_utf8_keeps_its_image(tmp_path):
    folder = tmp_path / "src" / "cat"
    folder.mkdir(parents=True)
    with open(os.fsencode(folder) + b"/caf\xe9.png", "wb") as file:
        file.write(png_bytes())
    assert main(["prepare", str(tmp_path / "src"), str(tmp_path / "out")]) == 0
    assert read_back(tmp_path / "out", "train") == {r"cat/caf\xe9": (png_bytes(), 0)}


def test_a_kill_leaves_what_dataset_json_says(tmp_path):
    """SIGKILL at several moments of adding a split: the folder stays whole."""
    out = tmp_path / "out"
    assert main(["prepare", "digits", str(out)]) == 0
    before = (out / "dataset.json").read_bytes()
    for number in range(400):
        target = tmp_path / "src" / "val" / str(number % 10) / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(jpeg(number, (200, 200)))
    command = [sys.executable, "-m", "mae_vit.cli.main", "prepare", str(tmp_path / "src"), str(out)]
    for killed in range(3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 500
        while not (out / ".val.partial").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05 * killed)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (out / "dataset.json").read_bytes() != before:
            break
        assert main(["check", str(out)]) == 0
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert main(["check", str(out)]) == 0
    assert set(json.loads((out / "dataset.json").read_text())["splits"]) == {"train", "test", "val"}
    assert [name for name in os.listdir(out) if "partial" in name] == []
