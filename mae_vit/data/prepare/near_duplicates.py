"""Images that `prepare` leaves out because a test set has them (ViT Sec. 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason, nearest, plain_text
from mae_vit.core.progress import progress
from mae_vit.data.prepare.convert import HASH_NAME, Conversion, Converted
from mae_vit.data.prepare.convert_pool import ConverterPool
from mae_vit.data.shards.dataset_json import Excluded, read_dataset
from mae_vit.data.shards.samples import images_of, read_samples
from mae_vit.data.shards.tar_headers import DamagedTar

# Of 64 bits. Of CIFAR-10's 50,000 training images 134 lie within 4 of one of its 10,000
# test images or of their mirror images: all but 3 to 5 are the same shot, seen one by one.
# Of pairs 6 apart about one in five is not. Of copies that were halved, or saved as JPEG of
# quality 75, or made 10 % brighter, 99.8 % and more stay within 4; of those cut by 5 %, a
# third, which is why of the 286 test images that ciFAIR (arXiv 1902.00423) lists with a
# near-duplicate about a quarter is found.
DEFAULT_DISTANCE = 4
# Beyond, all images of some kinds are one.
MAX_DISTANCE = 16
_MEASURED = ("test", "val")


@dataclass(frozen=True)
class KnownImages:
    """The hashes of prepared images.

    Attributes:
        name: of their folder and splits; no machine's path.
        keys: of the images, with their split.
        hashes: uint64 (n,), of each image and its mirror image.
        owners: int64 (n,), places in `keys`.
    """

    name: str
    keys: Sequence[str]
    hashes: np.ndarray
    owners: np.ndarray

    def nearest(self, value: int) -> tuple[int, str]:
        """The distance of the nearest image, and its key."""
        distances = np.bitwise_count(self.hashes ^ np.uint64(value))
        place = int(distances.argmin())
        return int(distances[place]), self.keys[self.owners[place]]


@dataclass
class Exclusion:
    """Decides which images are left out, and remembers them.

    Attributes:
        known: hashes to compare with.
        distance: the largest number of differing bits at which an image is left out.
        lines: of each image left out its key, what it is like, and the distance.
    """

    known: Sequence[KnownImages]
    distance: int
    lines: list[str] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Clears the list of excluded images, for another split."""
        self.lines, self._counts = [], [0] * len(self.known)

    def excludes(self, key: str, image: Converted) -> bool:
        """Whether an image is like a known one, and so left out."""
        assert image.hash is not None
        for number, known in enumerate(self.known):
            distance, other = known.nearest(image.hash[0])
            if distance <= self.distance:
                self._counts[number] += 1
                self.lines.append(f"{plain_text(key)}\t{known.name}\t{other}\t{distance}")
                return True
        return False

    def describe(self) -> list[Excluded]:
        """Returns the record for `dataset.json`."""
        return [
            Excluded(source=known.name, hash=HASH_NAME, distance=self.distance, samples=count)
            for known, count in zip(self.known, self._counts, strict=True)
        ]


def open_exclusion(specs: Sequence[str], distance: int, workers: int) -> Exclusion:
    """Hashes the images that are to be left out.

    Args:
        specs: data folders, `DIR` or `DIR:SPLIT`; without a split those called test and val.
        distance: see `Exclusion`.
        workers: processes that decode.

    Raises:
        InputError: if a folder or split is missing or cannot be read.
    """
    with ConverterPool(Conversion(hashed=True), workers) as pool:
        return Exclusion([_hash(*_find(spec), pool) for spec in specs], distance)


def _find(spec: str) -> tuple[Path, list[str]]:
    """Returns the folder and its splits."""
    folder, wanted = Path(spec), ""
    if not folder.exists() and ":" in spec:
        text, _, wanted = spec.rpartition(":")
        folder = Path(text)
    try:
        splits = read_dataset(folder).splits
    except InputError as error:
        raise InputError(f"--exclude {spec}: {error}") from None
    if wanted and wanted not in splits:
        raise InputError(f'--exclude {spec}: no split "{wanted}": {nearest(wanted, splits)}')
    found = [wanted] if wanted else [name for name in _MEASURED if name in splits]
    if not found:
        raise InputError(
            f'--exclude {spec}: has no split "test" or "val": give one of {", ".join(splits)} as {spec}:SPLIT'
        )
    return folder, found


def _hash(folder: Path, splits: Sequence[str], pool: ConverterPool) -> KnownImages:
    info = read_dataset(folder).splits
    name = plain_text(folder.resolve().name) + ":" + "+".join(splits)
    count = sum(info[split].samples for split in splits)
    paths = [(split, folder / shard.file) for split in splits for shard in info[split].shards]
    keys, values = list[str](), list[int]()
    bar = progress(total=count, desc=f"hashing {name}", unit=" images")
    try:
        with bar:
            for key, _, image in pool.run(_read(paths), count):
                if isinstance(image, str):
                    raise InputError(f"--exclude {folder}: {key}: {image}: see `mae-vit check {folder}`")
                assert image.hash is not None
                keys.append(key)
                values += image.hash
                bar.update()
    except (DamagedTar, OSError) as error:
        reason = f"{error.filename}: {error_reason(error)}" if isinstance(error, OSError) else str(error)
        raise InputError(f"--exclude {folder}: {reason}: see `mae-vit check {folder}`") from None
    hashes, first = np.unique(np.array(values, np.uint64), return_index=True)
    return KnownImages(name, keys, hashes, first // 2)


def _read(paths: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, bytes, str]]:
    for split, path in paths:
        for sample, data in images_of(path, read_samples(path)):
            yield f"{split}/{plain_text(sample.key)}", data, sample.extension
