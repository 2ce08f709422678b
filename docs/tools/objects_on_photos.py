"""Builds a small segmentation task without a network: pieces of CIFAR-10 images pasted on photographs, with true masks.

    python docs/tools/objects_on_photos.py OBJECTS PHOTOS OUT

OBJECTS has a folder for each class of CIFAR-10 (the test images, which no encoder of ours was pretrained on); PHOTOS
has folders `train` and `val` (or `test`) of photographs, such as Tiny ImageNet. OUT receives `images/`, `masks/` and
`classes.txt` for `mae-vit prepare OUT/images DATA --masks OUT/masks --mask-classes OUT/classes.txt`.

Each image is a square cut of a photograph. A turned ellipse of 50 to 90 % of the side shows the middle of an image of
OBJECTS instead. The mask is 0 outside, 1 inside for an animal, 2 for a vehicle, and 255 on the edge, whose mixed pixels
do not count. So it is that of the ellipse. Objects and photographs of test images are in no training image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("photograph", "animal", "vehicle")
VEHICLES = ("airplane", "automobile", "ship", "truck")
# Every fifth object is for test images.
TEST_EVERY = 5
AXES, EDGE, IGNORE = (0.5, 0.9), 0.25, 255
TRAIN_IMAGES, TEST_IMAGES, SIZE = 512, 400, 32


def images_below(folder: Path) -> list[Path]:
    """Lists the images below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))


def square(path: Path, rng: np.random.Generator) -> np.ndarray:
    """Cuts a random square of half to all of the short side: float (SIZE, SIZE, 3), 0 to 255."""
    image = Image.open(path).convert("RGB")
    side = int(min(image.size) * rng.uniform(0.5, 1.0))
    left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
    cut = image.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(cut, np.float64)


def cover_of(rng: np.random.Generator) -> tuple[np.ndarray, int, int, int]:
    """Draws an ellipse: the covered share of each pixel (SIZE, SIZE), and the square around it: top, left, side."""
    axes = SIZE * rng.uniform(*AXES, 2) / 2
    angle, side = rng.uniform(0, np.pi), int(np.ceil(2 * axes.max()))
    top, left = (int(rng.integers(0, SIZE - side + 1)) for _ in range(2))
    # Four by four places in each pixel.
    places = (np.arange(4 * SIZE) + 0.5) / 4
    down, right = places[:, None] - top - side / 2, places[None] - left - side / 2
    first, second = right * np.cos(angle) + down * np.sin(angle), down * np.cos(angle) - right * np.sin(angle)
    inside = (first / axes[0]) ** 2 + (second / axes[1]) ** 2 <= 1
    return inside.reshape(SIZE, 4, SIZE, 4).mean(axis=(1, 3)), top, left, side


def build(objects: list[Path], photos: list[Path], out: Path, *, count: int, seed: int) -> None:
    """Writes `count` images and masks of a split; its seed is its own, or both splits have the same ellipses."""
    rng = np.random.default_rng(seed)
    folders = [out.parent / part / out.name for part in ("images", "masks")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = square(photos[rng.integers(len(photos))], rng)
        path = objects[rng.integers(len(objects))]
        cover, top, left, side = cover_of(rng)
        shown = np.zeros_like(pixels)
        whole = Image.open(path).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
        shown[top : top + side, left : left + side] = np.asarray(whole, np.float64)
        pixels += cover[..., None] * (shown - pixels)
        label = 2 if path.parent.name in VEHICLES else 1
        mask = np.where(cover > 1 - EDGE, label, np.where(cover < EDGE, 0, IGNORE)).astype(np.uint8)
        Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(folders[0] / f"{number:05d}.png")
        Image.fromarray(mask).save(folders[1] / f"{number:05d}.png")


def main() -> None:
    """Runs the command line."""
    given, photos, out = map(Path, sys.argv[1:])
    test = photos / "test" if (photos / "test").is_dir() else photos / "val"
    objects = images_below(given)
    held = objects[::TEST_EVERY]
    rest = [path for place, path in enumerate(objects) if place % TEST_EVERY]
    build(rest, images_below(photos / "train"), out / "train", count=TRAIN_IMAGES, seed=0)
    build(held, images_below(test), out / "test", count=TEST_IMAGES, seed=1)
    (out / "classes.txt").write_text("\n".join(CLASSES) + "\n")


if __name__ == "__main__":
    main()
