"""User-defined data sets, read by sample number; `data.path` is then the name of the data set."""

from __future__ import annotations

import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from mae_vit.core import __version__
from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.dataset_json import FORMAT, SOURCES, Dataset, Shard, Split
from mae_vit.data.shards.shard_files import ReadError


class MapSource(ABC):
    """The photographs of one split, numbered 0..N-1 in a fixed order. Data workers get a pickled copy.

    Attributes:
        labels: int (N,), class of each image; -1 without a label.
        height: smallest and largest height in pixels.
        width: smallest and largest width in pixels.
        fingerprint: text that changes when the images do; a run resumes only if it is the same.
    """

    labels: np.ndarray
    height: tuple[int, int]
    width: tuple[int, int]
    fingerprint: str

    @abstractmethod
    def read(self, sample: int) -> np.ndarray | bytes:
        """Returns an image: uint8 (C, H, W), gray or RGB, or the bytes of a file such as JPEG or PNG.

        Raises:
            OSError: if it is lost; another image replaces it, within `data.damage_budget`.
            ValueError: if it is damaged; likewise.
        """


@dataclass
class _Data:
    """A registered data set; splits are opened once, when they are needed."""

    name: str
    splits: Mapping[str, Callable[[], MapSource]]
    classes: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]

    def describe(self) -> Dataset:
        return Dataset(
            format=FORMAT,
            tool=f"mae-vit {__version__}",
            classes=list(self.classes),
            channels=len(self.mean),
            mean=list(self.mean),
            std=list(self.std),
            statistics_images=len(next(iter(self.splits.values()))().labels),
            splits={split: self._describe_split(split, open_it()) for split, open_it in self.splits.items()},
        )

    def _describe_split(self, split: str, source: MapSource) -> Split:
        labels, total, classes = np.asarray(source.labels), len(source.labels), len(self.classes)
        where = f'split "{split}" of data set "{self.name}"'
        if not total:
            raise InputError(f"{where} has no images: its labels are empty")
        if labels.dtype.kind not in "iub" or labels.min() < -1 or labels.max() >= classes:
            raise InputError(
                f"labels of {where} must be whole numbers: -1 for none, else one of its {classes} classes, from 0"
            )
        digest = hashlib.sha256(source.fingerprint.encode() + labels.astype("<i8").tobytes()).hexdigest()
        return Split(
            samples=total,
            shards=[Shard(file=f"{self.name}.tar", samples=total, bytes=total, sha256=digest)],
            source=self.name,
            height=source.height,
            width=source.width,
            formats={},
            class_counts=np.bincount(labels[labels >= 0], minlength=classes).tolist(),
        )

    def open(self, split: str) -> ShardIndex:
        return _SourceIndex(self.name, split, self.describe(), self.splits[split]())


class _SourceIndex(ShardIndex):
    """Presents a split of a `MapSource` to the loader as one shard, whose keys are the sample numbers."""

    def __init__(self, name: str, split: str, dataset: Dataset, source: MapSource) -> None:
        super().__init__(Path(name), split, dataset)
        self._source, self.labels = source, np.asarray(source.labels, np.int32)

    def read(self, sample: int) -> bytes:
        try:
            image = self._source.read(sample)
        except (OSError, ValueError) as error:
            raise ReadError(error_reason(error)) from None
        if isinstance(image, bytes):
            return image
        kind = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        if not re.fullmatch(r"uint8 \([13], \d+, \d+\)", kind):
            raise InputError(
                f'data set "{self.folder}": read({sample}) returned {kind}; give uint8 (1, H, W), uint8 (3, H, W), '
                "or the bytes of a file"
            )
        stream = io.BytesIO()
        # BMP is the fastest format: it is not compressed.
        Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(stream, "bmp")
        return stream.getvalue()

    def shard_of(self, sample: int) -> str:
        return self.folder.name

    def find_key(self, sample: int) -> str:
        return f"{sample:09d}"

    def keys(self) -> list[str]:
        return [self.find_key(sample) for sample in range(len(self))]


def register_source(
    name: str,
    splits: Mapping[str, Callable[[], MapSource]],
    *,
    classes: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
) -> None:
    """Registers a data set for `data.path=NAME`. A plug-in calls this when it is imported.

    Args:
        name: is a value of `data.path`.
        splits: has a function that opens each split; `train` comes first.
        classes: names the classes; empty without labels.
        mean: has the mean of each channel of pixels in 0..1.
        std: has the standard deviation of each channel.

    Raises:
        ValueError: if the name is taken.
    """
    if name in SOURCES:
        raise ValueError(f'there is a data set "{name}"')
    once = {split: cache(open_it) for split, open_it in splits.items()}
    SOURCES[name] = _Data(name, once, classes, mean, std)
