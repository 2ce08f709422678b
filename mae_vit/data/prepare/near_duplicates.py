"""Finds images to leave out because a test set has them (ViT Sec. 4.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import nearest, plain_text
from mae_vit.data.prepare.convert import HASH_NAME, Conversion, Converted, as_before, convert_entries
from mae_vit.data.prepare.entries import SourceOptions
from mae_vit.data.prepare.sources.foreign_shards import open_shards
from mae_vit.data.shards.dataset_json import TEST_SPLITS, Excluded, read_dataset
from mae_vit.data.shards.tar_headers import Tar

# Differing bits of 64. In CIFAR-10, 134 of 50,000 training images are within 4 of one of the 10,000 test images or of
# its mirror image; looked at one by one, all but 3 to 5 are the same shot. About one in five pairs at distance 6 is
# not. At least 99.8 % of copies that are halved, saved as JPEG of quality 75, or made 10 % brighter stay within 4, but
# only a third of copies cropped by 5 %. So this finds about a quarter of the 286 test images that have a near-duplicate
# in the list of ciFAIR (arXiv 1902.00423).
_DISTANCE = 4


@dataclass
class Exclusion:
    """Decides which images are left out, and records them.

    Attributes:
        sources: names of the folders and splits of known images, without paths of this machine.
        images: name in `sources` of each known image, and its key with its split, separated by a tab.
        hashes: uint64 (N, 2), hashes of each known image and of its mirror image.
        lines: for each image left out of a split, its key, the known image that it resembles, and the distance.
    """

    sources: list[str]
    images: list[str]
    hashes: np.ndarray
    lines: list[str] = field(default_factory=list)

    def excludes(self, key: str, image: Converted) -> bool:
        """Whether an image is left out as a copy of a known one; if so, records it with the nearest."""
        assert image.hash is not None
        distances = np.bitwise_count(self.hashes ^ np.uint64(image.hash[0])).min(axis=1)
        closest = int(distances.argmin())
        if distances[closest] > _DISTANCE:
            return False
        self.lines.append(f"{plain_text(key)}\t{self.images[closest]}\t{distances[closest]}")
        return True

    def describe(self) -> list[Excluded]:
        """Returns the record for `dataset.json`."""
        counts = Counter(line.split("\t")[1] for line in self.lines)
        return [
            Excluded(source=name, hash=HASH_NAME, distance=_DISTANCE, samples=counts[name])
            for name in dict.fromkeys(self.sources)
        ]


def open_exclusion(specs: Sequence[str], workers: int, splits: Collection[str]) -> Exclusion:
    """Hashes the test and val images in data folders, `DIR` or `DIR:SPLIT`, that are left out of `splits`.

    Raises:
        InputError: if a folder or split is missing or cannot be read, or ImageHash is not installed.
    """
    if set(splits) <= set(TEST_SPLITS):
        raise InputError(
            f"--exclude does not apply to val and test, and the sources have only {', '.join(sorted(splits))}; leave "
            "it out"
        )
    if find_spec("imagehash") is None:
        raise InputError('--exclude needs imagehash, which is not installed; pip install "mae-vit[exclude]"')
    sources, images, hashes = list[str](), list[str](), list[tuple[int, int]]()
    for spec in specs:
        folder, known = _find(spec)
        sources.append(f"{plain_text(folder.resolve().name)}:{'+'.join(known)}")
        described, failed = read_dataset(folder).splits, list[str]()
        paths = [folder / shard.file for split in known for shard in described[split].shards]
        tars = [Tar(path, path) for path in paths]
        found = open_shards(folder, tars, sources[-1], SourceOptions(folder, labels=False)).entries
        entries = [replace(entry, read_mask=None) for entry in found]
        doing = f"hashing {sources[-1]}"
        hashing, count = as_before(Conversion(hashed=True), read_dataset(folder)), len(entries)
        for entry, _, image in convert_entries(entries, hashing, workers, doing, failed, count=count):
            assert image.hash is not None
            images.append(f"{sources[-1]}\t{entry.split}/{entry.key}")
            hashes.append(image.hash)
        if failed:
            raise InputError(f"--exclude {folder}: {failed[0]}; see `mae-vit check {folder}`")
    return Exclusion(sources, images, np.array(hashes, np.uint64))


def _find(spec: str) -> tuple[Path, list[str]]:
    """Returns the folder and the splits of `DIR` or `DIR:SPLIT`."""
    folder, wanted = Path(spec), ""
    if not folder.exists() and ":" in spec:
        text, _, wanted = spec.rpartition(":")
        folder = Path(text)
    try:
        splits = read_dataset(folder).splits
    except InputError as error:
        raise InputError(f"--exclude {spec}: {error}") from None
    if wanted and wanted not in splits:
        raise InputError(f'--exclude {spec}: no split "{wanted}"; {nearest(wanted, splits)}')
    chosen = [wanted] if wanted else [name for name in TEST_SPLITS if name in splits]
    if not chosen:
        raise InputError(
            f'--exclude {spec}: no split "test" or "val"; give one of {", ".join(splits)} as {spec}:SPLIT'
        )
    return folder, chosen
