"""`dataset.json`: what a folder of shards holds."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError, model_validator

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.data.shards.band_table import BandTable, StrictModel

FORMAT = 1
FILE_NAME = "dataset.json"
# The sources that `mae-vit prepare` has by name, for the message about a missing folder.
BUILT_IN = ("digits", "cifar10", "cifar100")


class Shard(StrictModel):
    """One tar file."""

    file: str = Field(pattern=r"^[^/\\]+\.tar$")
    samples: int = Field(gt=0)
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class IndexFile(StrictModel):
    """Where the samples of a split lie in its shards, as `mae_vit.data.index` keeps it.

    It is for readers from far away, which would have to read all shards to make it.
    """

    file: str = Field(pattern=r"^[^/\\]+\.npy$")
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Excluded(StrictModel):
    """Images that a split was prepared without, since a test set has them.

    Attributes:
        source: the test set's folder and splits.
        hash: by which images are compared.
        distance: the most bits that may differ.
        samples: how many were left out.
    """

    source: str
    hash: str
    distance: int = Field(ge=0)
    samples: int = Field(ge=0)


class Processing(Preprocessing):
    """What was done to a split when it was prepared: to its images, and to their choice.

    Attributes:
        subset: file that names its samples.
        fraction: share of the samples that was taken.
        limit_per_class: most samples of a class.
        holdout: share of the samples that was drawn: taken away from "train", and all of "val".
        excluded: near-duplicates of test sets, which were left out.
    """

    subset: str | None = None
    fraction: str | None = None
    limit_per_class: int | None = None
    holdout: str | None = None
    excluded: list[Excluded] | None = None

    @property
    def of_images(self) -> Preprocessing:
        """What inference has to repeat."""
        return Preprocessing(**{name: getattr(self, name) for name in Preprocessing.model_fields})


class Segmentation(StrictModel):
    """The classes of masks.

    Attributes:
        classes: names.
        ids: the number that a pixel of each class has in masks.
        ignore: the number of pixels that do not count.
    """

    classes: list[str] = Field(min_length=2)
    ids: list[int] = Field(min_length=2)
    ignore: int = Field(ge=0, le=0xFFFF)


class Masks(StrictModel):
    """The masks of a split: each image has one.

    Attributes:
        shares: of the pixels that count, by class.
        ignored: share of all pixels that do not count.
    """

    shares: list[float]
    ignored: float

    def describe(self, segmentation: Segmentation | None) -> str:
        """Names the number of classes, and the largest ones with their shares."""
        names = segmentation.classes if segmentation else [str(number) for number in range(len(self.shares))]
        largest = sorted(zip(names, self.shares, strict=True), key=lambda one: -one[1])[:5]
        shares = ", ".join(f"{name} {share:.1%}" for name, share in largest)
        return f"masks of {len(names)} classes: {shares}; {self.ignored:.1%} of the pixels ignored"


class Split(StrictModel):
    """One split: its shards, and what its images are like.

    Attributes:
        samples: images.
        shards: in order.
        source: what it was prepared from.
        height: smallest and largest, in pixels.
        width: smallest and largest.
        formats: images by file name extension.
        class_counts: images by class, in the order of the dataset's classes; those without
            a label are not among them.
        processing: what was done to the images and their choice.
        index: its index; None in folders that only lie here.
        masks: of its images; None without masks.
    """

    samples: int = Field(gt=0)
    shards: list[Shard] = Field(min_length=1)
    source: str
    height: tuple[int, int]
    width: tuple[int, int]
    formats: dict[str, int]
    class_counts: list[int]
    processing: Processing = Processing()
    index: IndexFile | None = None
    masks: Masks | None = None


class Dataset(StrictModel):
    """A folder of shards.

    Attributes:
        format: version of this file's layout.
        tool: what wrote it.
        classes: names; a sample's `.cls` is its place here; none if there are no labels.
        channels: bands of the images; of 8-bit photographs 1 if all are gray, else 3.
        mean: per-channel mean of train's pixels in 0..1 (of `bands` in unit scale, without missing ones).
        std: per-channel standard deviation.
        statistics_images: how many images mean and std are from.
        band_table: the section "bands"; None for 8-bit gray or RGB.
        splits: by name.
        segmentation: the classes of masks; None without masks.
    """

    model_config = ConfigDict(populate_by_name=True)

    format: int
    tool: str
    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    statistics_images: int
    band_table: BandTable | None = Field(default=None, alias="bands")
    splits: dict[str, Split]
    segmentation: Segmentation | None = None

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        count = None if self.band_table is None else len(self.band_table.names)
        if count is not None and {self.channels, len(self.mean), len(self.std)} != {count}:
            raise ValueError(f"channels, mean and std must be of the {count} bands")
        return self

    @property
    def bands(self) -> Bands | None:
        """What the values of the images mean; None for 8-bit gray or RGB."""
        table = self.band_table
        if table is None:
            return None
        low, high = tuple(table.scale.low), tuple(table.scale.high)
        return Bands(tuple(table.names), table.dtype, low, high, table.nodata)

    def to_json(self) -> str:
        """Returns the text of `dataset.json`."""
        return self.model_dump_json(indent=1, exclude_none=True, by_alias=True) + "\n"


def describe_shard(path: Path, samples: int) -> Shard:
    """Describes a shard as it lies there."""
    return Shard(file=path.name, samples=samples, bytes=path.stat().st_size, sha256=file_digest(path))


def file_digest(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file (hashlib.file_digest needs Python 3.11)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_dataset(folder: Path) -> Dataset:
    """Reads a data folder's description.

    Raises:
        InputError: if the folder is missing, empty, or not ours.
    """
    if not folder.is_dir() and re.search(r"[{*?[]|\.tar$", folder.name):
        raise InputError(
            f"data folder {folder} names shards: give the folder that holds them, {folder.parent}"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"data folder {folder} is a file: give the folder that holds {FILE_NAME}, {folder.parent}"
        )
    if not folder.exists() and (folder.parent / FILE_NAME).is_file():
        splits = ", ".join(read_dataset(folder.parent).splits)
        raise InputError(
            f"data folder {folder} does not exist: give {folder.parent}, which has the splits {splits}"
        )
    command = f"`mae-vit prepare {folder.name if folder.name in BUILT_IN else 'SRC'} {folder}`"
    if not folder.is_dir():
        hint = closest_path(folder)
        # By the name of a built-in source, another one that lies there is not meant.
        if folder.name in BUILT_IN and not hint.endswith(f'/{folder.name}"?'):
            hint = ""
        raise InputError(
            f"data folder {folder} does not exist: make it with {command}{f' ({hint})' if hint else ''}"
        )
    path = folder / FILE_NAME
    if not path.exists():
        tars = len(list(folder.glob("*.tar")))
        what = f"{tars} tar files but no {FILE_NAME}" if tars else f"no shards ({FILE_NAME} is missing)"
        if tars:
            others = any(file.suffix != ".tar" and file.name[:1] != "." for file in folder.iterdir())
            instead = f" if these are its data, else with `mae-vit prepare {folder} OUT`, and give OUT"
            command = f"`mae-vit prepare --in-place {folder}`{instead if others else ''}"
        elif any(folder.iterdir()):
            command = f"`mae-vit prepare {folder} OUT`, and give OUT"
        raise InputError(f"data folder {folder} holds {what}: make it with {command}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    return parse_dataset(data, str(path))


def parse_dataset(data: bytes, name: str) -> Dataset:
    """Checks a description.

    Args:
        data: the bytes of a `dataset.json`.
        name: of it, for messages.

    Raises:
        InputError: if it is none.
    """
    try:
        dataset = Dataset.model_validate(json.loads(data.decode("utf-8")))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"{name} is damaged: {where}: {problem['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is damaged: {error}") from None
    if dataset.format != FORMAT:
        raise InputError(f"{name} has format {dataset.format}; this version reads {FORMAT}")
    if not dataset.splits:
        raise InputError(f"{name} names no split")
    return dataset
