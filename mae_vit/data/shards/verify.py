"""Verifies shards against `dataset.json`, and names what is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mae_vit.core.bands import Bands
from mae_vit.core.messages import error_reason
from mae_vit.core.progress import progress
from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.shards.dataset_json import FILE_NAME, Shard, file_digest, read_dataset
from mae_vit.data.shards.index_files import index_hint, index_problem, index_shard, load_rows
from mae_vit.data.shards.samples import read_samples
from mae_vit.data.shards.tar_headers import DamagedTar, Tar

_NAMED = 5


def check(folder: Path, *, decode_all: bool = False) -> list[str]:
    """Returns a line for each problem of the shards: presence, size, checksum, structure, index.

    The samples of a damaged shard are decoded, with `decode_all` those of every shard.

    Raises:
        InputError: if the folder is not a data folder.
    """
    dataset = read_dataset(folder)
    shards = [shard for split in dataset.splits.values() for shard in split.shards]
    problems = [
        f"{FILE_NAME}: split {name} has {split.samples} samples, its shards {described}"
        for name, split in dataset.splits.items()
        if split.samples != (described := sum(shard.samples for shard in split.shards))
    ]
    classes = len(dataset.classes)
    with progress(total=sum(s.bytes for s in shards), desc="checking", unit="B", unit_scale=True) as bar:
        for name, split in dataset.splits.items():
            index, path = None, folder / (split.index.file if split.index else "no index")
            problem = index_problem(path, split, classes, compare=True) if split.index else "in dataset.json"
            if problem:
                problems.append(f"{path.name} {problem} (split {name}); {index_hint(folder)}")
            else:
                index = load_rows(path, split.samples)
            first = 0
            for shard in split.shards:
                rows = None if index is None else index[first : first + shard.samples]
                problems += _check_shard(folder / shard.file, shard, rows, classes, decode_all, dataset.bands)
                first += shard.samples
                bar.update(shard.bytes)
    return problems


def _check_shard(
    path: Path, shard: Shard, described: np.ndarray | None, classes: int, decode_all: bool, bands: Bands
) -> list[str]:
    try:
        size = path.stat().st_size
        digest = file_digest(path)
    except OSError as error:
        return [f"{shard.file}: {error_reason(error)}"]
    problems = []
    if size != shard.bytes:
        problems.append(f"{shard.file}: {size} bytes instead of {shard.bytes}")
    elif digest != shard.sha256:
        problems.append(f"{shard.file}: its checksum differs, so its bytes were changed")
    try:
        rows = index_shard(path, 0)
        if len(rows) != shard.samples:
            problems.append(f"{shard.file}: {len(rows)} samples instead of {shard.samples}")
        if len(rows) and (largest := int(rows["label"].max())) >= classes:
            problems.append(
                f"{shard.file}: a sample of class {largest}, but {FILE_NAME} has {classes} classes"
            )
        columns = ["offset", "length", "label", "key"]
        if not problems and described is not None and not np.array_equal(rows[columns], described[columns]):
            problems.append(f"{shard.file}: the index lists other samples; {index_hint(path.parent)}")
        if problems or decode_all:
            problems += _undecodable(path, bands)
    except (DamagedTar, OSError) as error:
        problems.append(f"{shard.file}: {str(error).removeprefix(f'{path}: ')}")
    return problems


def _undecodable(path: Path, bands: Bands) -> list[str]:
    """Names the samples of a shard that do not decode."""
    bad, tar = [], Tar(path, path)
    for sample in read_samples(path):
        try:
            decode(tar.read(sample.offset, sample.length), 3, bands=bands)
        except DecodeError as error:
            bad.append(f"{path.name}: {sample.name} at offset {sample.offset}: {error}")
    more = [f"{path.name}: {len(bad) - _NAMED} more samples do not decode"] if len(bad) > _NAMED else []
    return bad[:_NAMED] + more
