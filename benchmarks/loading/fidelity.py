"""How far pixels of `benchmarks/loader.py` are from PIL's, and whether bytes are equal."""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.loading.contenders import stream
from benchmarks.loading.rows import Row, augment_of
from mae_vit.data.batches.sources import open_source
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index

FIDELITY_IMAGES = 200


def fidelity(row: Row, folder: Path) -> dict[str, Any]:
    """How far pixels are from PIL's on the same boxes, or that all bytes are equal."""
    index = open_index(folder / row.ours, "train")
    if row.crop is None:
        images = {
            (Path(sample["__url__"]).name, sample["__key__"]): find_image(sample)
            for sample in stream(folder / row.peer)
        }
        equal = all(
            images[index.shard_of(sample), key] == index.read(sample)
            for sample, key in enumerate(index.keys())
        )
        return {"equal_bytes": equal and len(images) == len(index)}
    whole = open_index(folder / ("small" if row.small else "full"), "train")
    samples = np.arange(min(FIDELITY_IMAGES, len(index)))
    originals = [Image.open(io.BytesIO(whole.read(int(n)))).convert("RGB") for n in samples]
    stored = [Image.open(io.BytesIO(index.read(int(n)))).size[::-1] for n in samples]
    augment = augment_of(row, index)
    source = open_source(index, "auto", channels=3, augment=augment, memory_limit_gib=4)
    view = augment.draw(0, 0, samples, np.array(stored))
    differences = []
    for number, ours in enumerate(source.images(0, 0, samples)):
        box = view.boxes[number] / np.array(stored[number] * 2)
        theirs = pillow_view(originals[number], box, augment, bool(view.flips[number]))
        differences.append(np.abs(ours.transpose(1, 2, 0).astype(int) - theirs))
    means = [float(difference.mean()) for difference in differences]
    return {
        "mean": round(statistics.mean(means), 4),
        "p95_of_images": round(float(np.quantile(means, 0.95)), 4),
        "largest": int(max(difference.max() for difference in differences)),
    }


def find_image(sample: dict[str, Any]) -> bytes:
    """The image of a webdataset sample that holds nothing else."""
    return next(value for name, value in sample.items() if not name.startswith("__"))


def pillow_view(image: Image.Image, box: np.ndarray, augment: Augment, flip: bool) -> np.ndarray:
    """PIL's crop and bicubic resize of a box in shares of height and width: (H, W, 3)."""
    top, left, height, width = box * np.array([image.height, image.width] * 2)
    corners = (left, top, left + width, top + height)
    if all(abs(corner - round(corner)) < 1e-6 for corner in corners):
        cut = image.crop(tuple(round(corner) for corner in corners))
        if augment.crop != "pad":
            cut = cut.resize(augment.img_size[::-1], Image.Resampling.BICUBIC)
    else:  # between the pixels of the full size
        cut = image.resize(augment.img_size[::-1], Image.Resampling.BICUBIC, box=corners)
    pixels = np.asarray(cut)
    return pixels[:, ::-1] if flip else pixels
