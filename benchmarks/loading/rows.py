"""What `benchmarks/loader.py` measures: its rows, their data, and how images are seen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.prepare.convert import Conversion
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.selection import Selection
from mae_vit.data.prepare.sources.find import find_images

# MAE Sec. A.1, and the normalization of its code.
BOX: dict[str, Any] = {"scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3)}
PHOTO_PX, PAD_PX = 224, 4
SMALL_PER_CLASS = 1000
# Photographs as they are read lie in memory at best, not in a processor's cache.
MIB_OF_MANY = 256


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        ours: folder of the shards.
        peer: folder of the files, or of the shards, that the peer reads.
        crop: of `Augment`; None where bytes are read.
        goal: how many times the official pipeline's speed is asked for; of the only peer, where bytes are read.
        plain_goal: the same of the libraries of ours without a loader; None where they take no part.
        batches: of a turn.
        repeats: views of each image that is decoded.
    """

    ours: str
    peer: str
    crop: str | None
    goal: float
    batches: int = 0
    repeats: int = 1
    plain_goal: float | None = None

    @property
    def small(self) -> bool:
        """Whether images are small, and lie in memory."""
        return self.ours == "small"


ROWS = {
    "full": Row("full", "full-files", "random_resized", 2.5, batches=9, plain_goal=0.95),
    "short256": Row("short256", "short256-files", "random_resized", 5.5, batches=9, plain_goal=0.95),
    "repeats4": Row("full", "full-files", "random_resized", 5.5, batches=9, repeats=4, plain_goal=0.95),
    "small_pad": Row("small", "small-files", "pad", 15.0, batches=40),
    "small_rrc": Row("small", "small-files", "random_resized", 7.0, batches=40),
    "raw_small": Row("small", "small", None, 20.0),
    "raw_large": Row("many", "many", None, 8.0),
}


def augment_of(row: Row, index: ShardIndex) -> Augment:
    """The row's views, as a config would make them."""
    size = index.split_info.height[0] if row.small else PHOTO_PX
    options = {"pad_px": PAD_PX} if row.crop == "pad" else BOX
    return Augment(img_size=(size, size), crop=row.crop, flip=True, **options)  # type: ignore[arg-type]


def prepare_data(folder: Path, photos: str | None, small: str, rows: Iterable[Row]) -> None:
    """Prepares what the rows read in a new folder, through `prepare` itself."""
    needed = {name for row in rows for name in (row.ours, row.peer)}
    if needed & {"many", "short256"}:  # made of it, and compared with it
        needed.add("full")
    kinds = {
        "full": (photos, Selection(), Conversion()),
        "short256": (photos, Selection(), Conversion(Preprocessing(resize=256, quality=90))),
        "small": (small, Selection(limit_per_class=SMALL_PER_CLASS), Conversion()),
    }
    for name, (spec, selection, conversion) in kinds.items():
        if not needed & {name, f"{name}-files"}:
            continue
        if spec is None:
            raise InputError("rows of photographs need --photos SRC")
        out = folder / name
        prepare([find_images(spec, out=out)], out, selection=selection, conversion=conversion)
        if f"{name}-files" in needed:
            write_files(open_index(out, "train"), folder / f"{name}-files")
    if "many" in needed:
        write_many(folder / "full", folder / "many")


def write_many(shards: Path, folder: Path) -> None:
    """Lays shards out as often as makes `MIB_OF_MANY`."""
    folder.mkdir()
    paths = sorted(shards.glob("train-*.tar"))
    size = sum(path.stat().st_size for path in paths)
    for number in range(-(-MIB_OF_MANY * 2**20 // size)):
        for path in paths:
            shutil.copy(path, folder / f"train-{number:02}{path.stem[-4:]}.tar")
    index_in_place(folder, workers=os.cpu_count() or 1)


def write_files(index: ShardIndex, folder: Path) -> None:
    """Writes the same bytes as CLASS/NUMBER.EXTENSION for ImageFolder."""
    extension = next(iter(index.split_info.formats))
    for sample in range(len(index)):
        path = folder / f"{index.labels[sample]:04}" / f"{sample:06}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(index.read(sample))
