"""Shards whose bytes were changed at random: refused in one line, never read as something else."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.batch_digests import open_digits

from mae_vit.cli.main import main
from mae_vit.core.errors import DamagedSample, InputError
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.index import open_index, open_training_index
from mae_vit.data.order.order import GlobalOrder, RankSlice
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.data.prepare.publish import ShardWriter, write_description
from mae_vit.data.shards import shard_files

pytestmark = pytest.mark.timeout(900)
SAMPLES, SHARDS = 48, 3
BLOCK = 512


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    """48 samples in 3 shards."""
    out, index = tmp_path_factory.mktemp("whole"), open_index(digits, "train")
    with ShardWriter(out, "train", shard_bytes=1 << 30, shard_samples=SAMPLES // SHARDS) as writer:
        for sample in range(SAMPLES):
            writer.write(f"{sample:06d}", "png", index.read(sample), int(index.labels[sample]))
    train = index.split_info.model_copy(
        update={"shards": writer.shards, "samples": SAMPLES, "index": None, "class_counts": [0] * 10}
    )
    described = index.dataset.model_copy(update={"splits": {"train": train}})
    write_description(out, described)
    index_in_place(out, overwrite=True)
    return out


def flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def zero(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    length = chance.choice([1, 16, BLOCK, 4 * BLOCK])
    data[start : start + length] = bytes(len(data[start : start + length]))


def noise(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    length = len(data[start : start + chance.choice([4, 100, BLOCK])])
    data[start : start + length] = chance.randbytes(length)


def insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.choice([1, 7, BLOCK, 3 * BLOCK]))


def remove(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice([1, 7, BLOCK, 3 * BLOCK])]


def header(data: bytearray, chance: random.Random) -> None:
    """Any value in any field of a header, its checksum made right: what an attacker would do."""
    at = BLOCK * chance.randrange(len(data) // BLOCK)
    start, length = chance.choice([(0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (345, 155)])
    field = chance.choice(
        [chance.randbytes(length), b"7" * length, b"-1".ljust(length, b" "), b"\xff" * length, bytes(length)]
    )
    data[at + start : at + start + length] = field
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


def compressed(data: bytearray, chance: random.Random) -> None:
    data[:2] = chance.choice([b"\x1f\x8b", b"BZ", b"PK"])


def emptied(data: bytearray, chance: random.Random) -> None:
    data[:] = b"" if chance.random() < 0.5 else bytes(len(data))


WAYS = [flip, truncate, zero, noise, insert, remove, header, compressed, emptied]


def all_images(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    index = open_index(folder, "train")
    source = open_digits(index, "tar")
    return source.render(0, 0, np.arange(len(index))).images, np.asarray(index.labels)


def check_one(number: int, whole: Path, place: Path, images, labels, capsys) -> str:
    """Changes a copy; returns how it was met."""
    chance = random.Random(number)
    copy = place / str(number)
    shutil.copytree(whole, copy)
    changed = False
    for file in chance.sample(sorted(copy.glob("*.tar")), chance.choice([1, 1, 2])):
        data = bytearray(file.read_bytes())
        chance.choice(WAYS)(data, chance)
        changed |= bytes(data) != file.read_bytes()
        file.chmod(0o644)
        file.write_bytes(data)
    assert main(["check", str(copy)]) == (1 if changed else 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    try:
        met = train(copy, images, labels)
    except (InputError, DamagedSample) as error:
        met, said = "refused", str(error)
    assert met != "refused" or "\n" not in said
    # Described anew, they are what they are.
    assert main(["prepare", "--in-place", str(copy), "--overwrite"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
    # Others' shards, of which nobody said what they hold.
    (copy / "dataset.json").unlink()
    for words in (["--in-place", str(copy)], [str(copy), str(place / f"{number}-out")]):
        assert main(["prepare", *words]) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err
    shutil.rmtree(copy)
    return met


def train(folder: Path, images, labels) -> str:
    """Goes through an epoch; all that comes is what it should be, or stands in for what is known to be damaged."""
    index = open_training_index(folder, "train", damage_budget=0.9, say=False)
    batches = load_batches(
        open_digits(index, "tar"), GlobalOrder(SAMPLES, 16, 0), RankSlice(), start_step=0, stop_step=3
    )
    replaced = 0
    for batch in batches:
        bad = {damage.sample for damage in batch.damaged}
        for place, sample in enumerate(batch.keys.index.tolist()):
            if sample in bad:
                replaced += 1
            else:
                # The view is drawn for the sample, so its pixels tell whose they are.
                assert np.array_equal(batch.images[place].numpy(), images[sample]), sample
            assert 0 <= int(batch.labels[place]) < 10 or int(batch.labels[place]) == -1
    return "replaced" if replaced else "unharmed"


@pytest.mark.parametrize(
    "numbers",
    [pytest.param(range(10), id="10"), pytest.param(range(10, 500), id="490", marks=pytest.mark.slow)],
)
def test_changed_bytes_are_never_taken_for_samples(whole, tmp_path, capsys, monkeypatch, numbers):
    # A shard that is cut short is waited for: seconds each, which hundreds of them do not need.
    monkeypatch.setattr(shard_files, "_WAITS_S", (0.0, 0.01))
    images, labels = all_images(whole)
    met = [check_one(number, whole, tmp_path, images, labels, capsys) for number in numbers]
    # Not all alike: else the test tests little.
    assert len(set(met)) > 1
