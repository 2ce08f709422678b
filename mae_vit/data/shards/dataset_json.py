"""`dataset.json`: the description of a folder of shards."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mae_vit.core.bands import RGB8, Bands, Dtype
from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.core.messages import closest_path
from mae_vit.core.preprocessing import Preprocessing

FORMAT = 1
FILE_NAME = "dataset.json"
# Built-in sources of `mae-vit prepare`, for the message about a missing folder.
BUILT_IN = ("digits", "cifar10", "cifar100")
# Splits to test on, best first.
TEST_SPLITS = ("test", "val")


class StrictModel(BaseModel):
    """A part of `dataset.json`: frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Scale(StrictModel):
    """The raw value of each band that becomes 0 and 1 in unit scale.

    `by` is "percentiles 1, 99" of the band, "given" by the user, or "none": the type's own range (0..1 of floats).
    """

    low: list[float]
    high: list[float]
    by: str


class BandTable(StrictModel):
    """The section "bands" of images other than 8-bit gray or RGB: what their values mean, and raw statistics of train.

    Attributes:
        names: one for each band.
        dtype: type of raw values.
        scale: maps raw values to unit scale, which the mean and std of the data set use.
        nodata: raw value of missing pixels; None if there is none (NaN in floating-point images).
        nodata_share: share of each band's pixels without a value, 0 to 1.
        min: smallest raw value of each band.
        max: largest.
        percentiles: raw values by percentile ("1", "2", "50", "98", "99"), one for each band.
        exact: whether the percentiles are of all pixels; else of a sample of them.
    """

    names: list[str] = Field(min_length=1)
    dtype: Dtype
    scale: Scale
    nodata: float | None = None
    nodata_share: list[float]
    min: list[float]
    max: list[float]
    percentiles: dict[str, list[float]]
    exact: bool

    @model_validator(mode="after")
    def _check(self) -> BandTable:
        count = len(self.names)
        if len(set(self.names)) < count:
            raise ValueError("two bands have the same name")
        columns = {f"percentiles.{key}": values for key, values in self.percentiles.items()}
        columns |= {"scale.low": self.scale.low, "scale.high": self.scale.high}
        columns |= {"nodata_share": self.nodata_share, "min": self.min, "max": self.max}
        for name, values in columns.items():
            if len(values) != count or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} needs a finite number for each name ({count})")
        if any(high <= low for low, high in zip(self.scale.low, self.scale.high, strict=True)):
            raise ValueError("scale.high must be above scale.low in each band")
        return self


class Shard(StrictModel):
    """One tar file."""

    file: str = Field(pattern=r"^[^/\\]+\.tar$")
    samples: int = Field(gt=0)
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class IndexFile(StrictModel):
    """Where the samples of a split lie in its shards (`mae_vit.data.index`), for readers without the shards."""

    file: str = Field(pattern=r"^[^/\\]+\.npy$")
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Excluded(StrictModel):
    """Images left out of a split because `source`, a test set, has them: their hashes differ in few bits."""

    source: str
    hash: str
    distance: int = Field(ge=0)
    samples: int = Field(ge=0)


class Processing(Preprocessing):
    """How a split was prepared: changes to its images, and the selection of its samples.

    Attributes:
        fraction: share of the samples that was taken.
        limit_per_class: most samples of a class.
        holdout: share of the samples that was held out: removed from "train", or all of "val".
        excluded: near-duplicates of test sets, which were left out.
    """

    fraction: str | None = None
    limit_per_class: int | None = None
    holdout: str | None = None
    excluded: list[Excluded] | None = None

    @property
    def of_images(self) -> Preprocessing:
        """The changes to images, which inference has to repeat."""
        return Preprocessing(**{name: getattr(self, name) for name in Preprocessing.model_fields})


class Segmentation(StrictModel):
    """The classes of masks, the number that their pixels have, and the number of pixels that do not count."""

    classes: list[str] = Field(min_length=2)
    ids: list[int] = Field(min_length=2)
    ignore: int = Field(ge=0, le=0xFFFF)


class Masks(StrictModel):
    """The masks of a split, one for each image: share of each class in the pixels that count, and of all others."""

    shares: list[float]
    ignored: float

    def describe(self, segmentation: Segmentation | None) -> str:
        """Names the number of classes, and the largest ones with their shares."""
        names = segmentation.classes if segmentation else [str(number) for number in range(len(self.shares))]
        largest = sorted(zip(names, self.shares, strict=True), key=lambda one: -one[1])[:5]
        shares = ", ".join(f"{name} {share:.1%}" for name, share in largest)
        return f"masks of {len(names)} classes: {shares}; {self.ignored:.1%} of the pixels ignored"


class Split(StrictModel):
    """One split: its shards, and facts about its images.

    Attributes:
        source: what it was prepared from.
        height: smallest and largest, in pixels; `width` likewise.
        formats: number of images by file name extension.
        class_counts: number of images per class, in the order of the dataset's classes; unlabeled images are left out.
        processing: changes to the images, and their selection.
        index: its index; None for data sets of plug-ins.
        masks: its images' masks; None without any.
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
        classes: names; a sample's `.cls` is an index into them; empty if there are no labels.
        channels: number of bands; for 8-bit photographs 1 if all are gray, else 3.
        mean: mean of each channel over train's pixels, in 0..1 (in unit scale of `bands`, without missing pixels).
        std: standard deviation of each channel.
        statistics_images: number of images that mean and std were computed from.
        band_table: the section "bands"; None for 8-bit gray or RGB.
        splits: each split, by its name.
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
    def bands(self) -> Bands:
        """What the values of the images mean."""
        table = self.band_table
        if table is None:
            return RGB8
        low, high = tuple(table.scale.low), tuple(table.scale.high)
        return Bands(tuple(table.names), table.dtype, low, high, table.nodata)

    def is_labeled(self, split: str, masks: bool) -> bool:
        """Returns whether there is such a split, and an image of it has a label; with `masks`, a mask."""
        info = self.splits.get(split)
        return bool(info and (info.masks if masks else self.classes and any(info.class_counts)))

    def test_split(self, *seen: str, masks: bool = False) -> str | None:
        """Returns the best split to test on that is labeled (`is_labeled`) and none of `seen`; None without any."""
        return next((name for name in TEST_SPLITS if name not in seen and self.is_labeled(name, masks)), None)

    def to_json(self) -> str:
        """Returns the text of `dataset.json`."""
        return self.model_dump_json(indent=1, exclude_none=True, by_alias=True) + "\n"


_RESTORE = "restore it, or delete it and prepare the data again"
# Data sets of plug-ins (`mae_vit.data.map_source`), by the name in `data.path`: each can `describe` itself as
# `dataset.json` would, and `open` a split as a `ShardIndex`.
SOURCES: dict[str, Any] = {}


def describe_shard(path: Path, samples: int) -> Shard:
    """Describes a shard file: its name, samples, size and checksum."""
    return Shard(file=path.name, samples=samples, bytes=path.stat().st_size, sha256=file_digest(path))


def file_digest(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file (hashlib.file_digest needs Python 3.11)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_dataset(folder: Path) -> Dataset:
    """Reads a data folder's description; raises InputError if the folder is missing, empty, or not a data folder."""
    if own := SOURCES.get(str(folder)):
        described: Dataset = own.describe()
        return described
    path = folder / FILE_NAME
    if not path.exists():
        raise InputError(f"data folder {folder} {_why_none(folder)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    return parse_dataset(data, str(path))


def _why_none(folder: Path) -> str:
    """Says what lies in place of a data folder, and how to get one."""
    if is_hub_name(str(folder)):
        own = f"data/{folder.name.partition('@')[0]}"
        return f"is a data set of the Hub; run `mae-vit prepare {folder} {own}`, and give {own}"
    if not folder.is_dir():
        beside = folder.exists() or (folder.parent / FILE_NAME).is_file()
        if beside or re.search(r"[{*?[]|\.tar$", folder.name):
            return f"is not a folder; give the one that contains {FILE_NAME}, {folder.parent}"
        hint, name = closest_path(folder), folder.name if folder.name in BUILT_IN else ""
        # The name of a built-in source is not a misspelling of another folder.
        hint = "" if name and not hint.endswith(f'/{name}"?') else hint
        return f"does not exist; make it with `mae-vit prepare {name or 'SRC'} {folder}`{f' ({hint})' if hint else ''}"
    anew = f"`mae-vit prepare {folder} OUT`, and give OUT"
    if tars := len(list(folder.glob("*.tar"))):
        return (
            f"contains {tars} tar files but no {FILE_NAME}; if they are shards run `mae-vit prepare --in-place "
            f"{folder}`, else {anew}"
        )
    anew = anew if any(folder.iterdir()) else f"`mae-vit prepare SRC {folder}`"
    return f"contains no shards ({FILE_NAME} is missing); run {anew}"


def parse_dataset(data: bytes, name: str) -> Dataset:
    """Parses and checks a `dataset.json`; `name` is its name in messages.

    Raises:
        InputError: if it is not valid.
    """
    try:
        dataset = Dataset.model_validate(json.loads(data.decode("utf-8")))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        what = problem["msg"].removeprefix("Value error, ")
        raise InputError(f"{name} is damaged: {where}: {what}; {_RESTORE}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is damaged: {error}; {_RESTORE}") from None
    if dataset.format != FORMAT:
        raise InputError(
            f"{name} has format {dataset.format}, but this version reads {FORMAT}; prepare the data again"
        )
    if not dataset.splits:
        raise InputError(f"{name} has no split; prepare the data again")
    return dataset
