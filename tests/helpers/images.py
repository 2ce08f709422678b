"""Small images and archives for the tests of this folder, and what they share."""

import io
import json
import math
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from mae_vit.data.prepare.masks import pair_masks, read_classes
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Image.Image:
    """A smooth picture of any mode, different for each seed; `size` is (width, height)."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, kind: str = "jpeg", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(
    path: Path, files: dict[str, bytes] | list[tuple[str, bytes]], mode: str = "w", **options
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **options) as tar:
        for name, data in files.items() if isinstance(files, dict) else files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_zip(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]], **options) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            archive.writestr(name, data)
    return path


def read_back(out: Path, split: str = "train") -> dict[str, dict[str, bytes]]:
    """Every sample of a split through tarfile: key -> members."""
    samples: dict[str, dict[str, bytes]] = {}
    for shard in sorted(out.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar.getmembers():
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                assert extension not in samples.setdefault(key, {}), member.name
                samples[key][extension] = tar.extractfile(member).read()
    return samples


def img2dataset(folder: Path) -> Path:
    """Two shards as img2dataset writes them: jpg, json, txt, and statistics beside."""
    for shard in range(2):
        members: list[tuple[str, bytes]] = []
        for number in range(6):
            key = f"{shard:05d}{number:04d}"
            members += [
                (f"{key}.jpg", encoded(picture(10 * shard + number))),
                (f"{key}.txt", b"a caption"),
                (
                    f"{key}.json",
                    json.dumps({"key": key, "caption": "a caption", "status": "success"}).encode(),
                ),
            ]
        write_tar(folder / f"{shard:05d}.tar", members)
        (folder / f"{shard:05d}_stats.json").write_text('{"count": 6}')
    return folder


def labeled_shards(folder: Path) -> Path:
    members = []
    for number in range(12):
        members.append((f"{number}.cls", b"%d" % (number % 11)))
        members.append((f"{number}.png", encoded(picture(number), "png")))
    write_tar(folder / "imagenet-train-000000.tar", members)
    write_tar(folder / "imagenet-val-000000.tar", members[:4])
    return folder


def smooth(channels: int, height: int = 32, width: int = 40, count: int = 1) -> np.ndarray:
    """Images with edges and with smooth parts: uint8 (count, C, H, W)."""
    rows, columns = np.mgrid[:height, :width]
    waves = [
        127 + 100 * np.sin(rows / (3 + n) + c) * np.cos(columns / (4 + c))
        for n in range(count)
        for c in range(3)
    ]
    images = np.stack(waves).reshape(count, 3, height, width)
    images[:, :, height // 4 : height // 2, width // 4 : width // 2] += 25
    return images[:, :channels].astype(np.uint8)


def assert_share(count: float, total: int, share: float) -> None:
    """A count of drawn cases is within five standard errors of its binomial."""
    error = math.sqrt(total * share * (1 - share))
    assert abs(count - total * share) <= 5 * error, (count, total * share)


# Gray value of class k: STEP * k + 10. Pixels of class 0 with this value more do not count.
STEP, FIRST, IGNORED = 20, 10, 5


def prepare_colored_digits(
    folder: Path, out: Path, *, height: int = 32, width: int = 32, colors=(0, 1, 2)
) -> Path:
    """Shards of scikit-learn's digits, each in several colors (channels to fill), at a multiple of 8 px."""
    data = load_digits()
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        large = np.kron(image * 15, np.ones((height // 8, width // 8))).astype(np.uint8)
        for name, color in enumerate(colors):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[..., color] = large if isinstance(color, int) else large[..., None]
            target = folder / ("val" if number % 10 == 0 else "train") / str(label)
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(target / f"{number}-{name}.png", compress_level=0)
    prepare([find_images(str(folder), out=out, split="train", root=None)], out)
    return out


def write_pairs(
    folder: Path, *, count: int = 40, side: int = 8, classes: int = 3, splits=("train", "test")
) -> Path:
    """Writes images/SPLIT/N.png, masks/SPLIT/N.png and classes.txt; each mask has quadrants of random classes."""
    rng = np.random.default_rng(0)
    for split in splits:
        for part in ("images", "masks"):
            (folder / part / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            mask = np.kron(rng.integers(0, classes, (2, 2)), np.ones((side // 2, side // 2), int)).astype(
                np.uint8
            )
            pixels = (FIRST + STEP * mask).astype(np.uint8)
            mask[0, :2], pixels[0, :2] = 255, IGNORED
            Image.fromarray(mask).save(folder / "masks" / split / f"{number}.png")
            Image.fromarray(pixels).save(folder / "images" / split / f"{number}.png")
    (folder / "classes.txt").write_text(
        "\n".join(["ground", *(f"thing {k}" for k in range(1, classes))]) + "\n"
    )
    return folder


def prepare_pairs(folder: Path, out: Path, *, ignore: int = 255, **options):
    """Prepares what `write_pairs` wrote."""
    source = find_images(str(folder / "images"), out=out, split="train", root=None)
    segmentation = read_classes(folder / "classes.txt", ignore)
    return prepare([pair_masks(source, folder / "masks", segmentation)], out, **options)
