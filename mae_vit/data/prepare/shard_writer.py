"""Writes samples as webdataset shards, through webdataset's own writer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import webdataset as wds

from mae_vit.data.shards.dataset_json import Shard, describe_shard
from mae_vit.data.shards.samples import MASK_EXTENSION


class ShardWriter:
    """Writes samples to SPLIT-000000.tar, SPLIT-000001.tar, ... through webdataset's writer."""

    def __init__(self, folder: Path, split: str, shard_bytes: int, shard_samples: int) -> None:
        """Writes into `folder`."""
        self.folder, self.split = folder, split
        self._shard_bytes, self._shard_samples = shard_bytes, shard_samples
        self._writer: Any = None
        self._file: Any = None
        self._samples = 0
        self.shards: list[Shard] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_shard()

    def write(
        self, key: str, extension: str, data: bytes, label: int | None, mask: bytes | None = None
    ) -> None:
        """Appends a sample; its bytes are stored unchanged. Without a label it has no `.cls`."""
        size = len(data) + len(mask or b"")
        if self._file is not None and (
            self._samples >= self._shard_samples or self._file.tell() + size > self._shard_bytes
        ):
            self._close_shard()
        if self._file is None:
            self._file = (self.folder / f"{self.split}-{len(self.shards):06d}.tar").open("wb")
            # Without time and user, equal sources give equal bytes.
            self._writer = wds.TarWriter(self._file, encoder=False, mtime=0, user="", group="", mode=0o644)
        sample: dict[str, Any] = {"__key__": key, extension: data}
        if mask is not None:
            sample[MASK_EXTENSION] = mask
        if label is not None:
            sample["cls"] = str(label).encode()
        self._writer.write(sample)
        self._samples += 1

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        path = Path(self._file.name)
        self._file.close()
        self.shards.append(describe_shard(path, self._samples))
        self._writer = self._file = None
        self._samples = 0
