"""Data folders of any size to measure with: a few real shards under many names, and their index.

A few tars of real images are written through the library's own writer; each has thousands of names (hard links), so
that every sample can be read. The index is not walked out of all tar headers, which takes a minute for each ten
million samples: the rows of the few tars are repeated in it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from mae_vit.core import __version__
from mae_vit.data.prepare.publish import ShardWriter, index_path
from mae_vit.data.shards.dataset_json import FILE_NAME, FORMAT, Dataset, IndexFile, Shard, Split, file_digest
from mae_vit.data.shards.index_files import ROW, index_shard

# A file has at most 65,000 names on ext4.
_NAMES_PER_FILE = 20_000
_CLASSES = 10


def write_many_shards(folder: Path, *, shards: int, shard_samples: int, img_size: int = 64) -> int:
    """Writes a split "train" of `shards` shards into a new folder; returns the number of samples.

    Each shard has `shard_samples` JPEGs of scikit-learn's digits in color, of `img_size` pixels; each fourth one is
    a fourth wider, so that images are decoded when they are read.
    """
    folder.mkdir(parents=True)
    written = _write_files(folder, -(-shards // _NAMES_PER_FILE), shard_samples, img_size)
    described = []
    for number in range(shards):
        shard = written[number % len(written)]
        name = f"train-{number:06d}.tar"
        os.link(folder / shard.file, folder / name)
        described.append(shard.model_copy(update={"file": name}))
    samples = shards * shard_samples
    counts = [len(range(label, shard_samples, _CLASSES)) * shards for label in range(_CLASSES)]
    split = Split(
        samples=samples,
        shards=described,
        source="digits, many times",
        height=(img_size, img_size),
        width=(img_size, img_size * 5 // 4),
        formats={"jpg": samples},
        class_counts=counts,
        index=_write_index(folder, [index_shard(folder / shard.file, 0) for shard in written], shards),
    )
    dataset = Dataset(
        format=FORMAT,
        tool=f"mae-vit {__version__}",
        classes=[str(label) for label in range(_CLASSES)],
        channels=3,
        mean=[0.5] * 3,
        std=[0.25] * 3,
        statistics_images=shard_samples,
        splits={"train": split},
    )
    (folder / FILE_NAME).write_text(dataset.model_dump_json())
    return samples


def _write_files(folder: Path, files: int, samples: int, img_size: int) -> list[Shard]:
    """Writes the tars that all names stand for."""
    digits = load_digits().images
    with ShardWriter(folder, "file", shard_bytes=1 << 40, shard_samples=samples) as writer:
        for number in range(files * samples):
            pixels = Image.fromarray((digits[number % len(digits)] * 15).astype(np.uint8)).convert("RGB")
            width = img_size * (5 if number % 4 == 0 else 4) // 4
            data = io.BytesIO()
            pixels.resize((width, img_size)).save(data, "JPEG", quality=90)
            writer.write(f"{number:08d}", "jpg", data.getvalue(), number % samples % _CLASSES)
    return writer.shards


def _write_index(folder: Path, files: list[np.ndarray], shards: int) -> IndexFile:
    """Writes the array of all shards, a part at a time: at 100 million samples it has 2.4 GB."""
    path, each = index_path(folder, "train"), len(files[0])
    array = np.lib.format.open_memmap(path, mode="w+", dtype=ROW, shape=(shards * each,))
    for shard in range(shards):
        rows = array[shard * each : (shard + 1) * each]
        rows[:] = files[shard % len(files)]
        rows["shard"] = shard
    array.flush()
    return IndexFile(file=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
