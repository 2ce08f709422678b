"""Verifies shards against `dataset.json`, and names what is damaged."""

from __future__ import annotations

from pathlib import Path

from mae_vit.core.messages import error_reason
from mae_vit.core.progress import progress
from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.shards.dataset_json import FILE_NAME, Shard, file_digest, read_dataset
from mae_vit.data.shards.index_rows import index_shard
from mae_vit.data.shards.samples import images_of, read_samples
from mae_vit.data.shards.tar_headers import DamagedTar

_NAMED = 5


def check(folder: Path, *, decode_all: bool = False) -> list[str]:
    """Reads every shard: presence, size, checksum, structure; samples too where one is damaged.

    Args:
        folder: the data folder.
        decode_all: decode every image, also of shards whose checksum is right.

    Returns:
        A line for each problem; none if all is well.

    Raises:
        InputError: if the folder is no data folder.
    """
    dataset = read_dataset(folder)
    shards = [shard for split in dataset.splits.values() for shard in split.shards]
    problems = [
        f"{FILE_NAME}: split {name} says {split.samples} samples, its shards {described}"
        for name, split in dataset.splits.items()
        if split.samples != (described := sum(shard.samples for shard in split.shards))
    ]
    with progress(total=sum(s.bytes for s in shards), desc="checking", unit="B", unit_scale=True) as bar:
        for shard in shards:
            problems += _check_shard(folder / shard.file, shard, len(dataset.classes), decode_all)
            bar.update(shard.bytes)
    return problems


def _check_shard(path: Path, shard: Shard, classes: int, decode_all: bool) -> list[str]:
    try:
        size = path.stat().st_size
        digest = file_digest(path)
    except OSError as error:
        return [f"{shard.file}: {error_reason(error)}"]
    problems = []
    if size != shard.bytes:
        problems.append(f"{shard.file}: {size} bytes instead of {shard.bytes}")
    elif digest != shard.sha256:
        problems.append(f"{shard.file}: checksum differs: its bytes were changed")
    try:
        rows = index_shard(path, 0)
        if len(rows) != shard.samples:
            problems.append(f"{shard.file}: {len(rows)} samples instead of {shard.samples}")
        if len(rows) and (largest := int(rows["label"].max())) >= classes:
            problems.append(f"{shard.file}: a sample of class {largest}, {FILE_NAME} names {classes} classes")
        if problems or decode_all:
            problems += _undecodable(path)
    except (DamagedTar, OSError) as error:
        problems.append(f"{shard.file}: {str(error).removeprefix(f'{path}: ')}")
    return problems


def _undecodable(path: Path) -> list[str]:
    """Names the samples of a shard that do not decode."""
    bad = []
    for sample, data in images_of(path, read_samples(path)):
        try:
            decode(data, 3)
        except DecodeError as error:
            bad.append(f"{path.name}: {sample.key}.{sample.extension} at offset {sample.offset}: {error}")
    more = [f"{path.name}: {len(bad) - _NAMED} more samples do not decode"] if len(bad) > _NAMED else []
    return bad[:_NAMED] + more
