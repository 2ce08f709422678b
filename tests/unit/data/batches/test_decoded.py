"""The array of all decoded images of a split: what is black, what is made again, and a disk without room."""

import errno
import os
import pickle
import shutil

import numpy as np
import pytest
from helpers.batch_digests import open_digits
from helpers.damage import damage
from helpers.images import encoded, write_files
from PIL import Image

from mae_vit.core.errors import DamagedSample, InputError
from mae_vit.data.batches import sources as reading
from mae_vit.data.index import open_index
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.shards.index_files import cache_folder


def source_of(data, name):
    return open_digits(open_index(data, "train"), name)


def test_damaged_samples_of_a_decoded_array_are_decoded_again(digits, copy, monkeypatch):
    damage(digits, copy, {7: "undecodable", 9: "undecodable"})
    assert (copy / "train-000000.tar").stat().st_size == (digits / "train-000000.tar").stat().st_size
    first = source_of(copy, "memory")
    monkeypatch.setattr(reading, "create_array", None)
    second = source_of(copy, "memory")
    for source in (first, second, pickle.loads(pickle.dumps(second))):
        assert source.render(0, 0, np.array([8])).images.any()
        with pytest.raises(DamagedSample, match="not an image") as raised:
            source.render(0, 0, np.array([9, 8, 7]))
        assert [(position, one.sample) for position, one in raised.value.damaged] == [(0, 9), (2, 7)]


def test_a_decoded_array_that_was_cut_short_is_made_again(copy):
    whole = source_of(copy, "memory").render(0, 0, np.arange(9)).images
    (array,) = cache_folder(copy).glob("train-*uint8-1.npy")
    os.truncate(array, 5000)
    # Of a process that was killed while it wrote.
    stale = array.with_name(f".{array.name}.123.tmp")
    stale.write_bytes(b"half")
    again = source_of(copy, "memory").render(0, 0, np.arange(9)).images
    assert np.array_equal(again, whole)
    assert array.stat().st_size > 5000
    assert not stale.exists()


def test_without_room_for_the_decoded_array_it_says_so_and_leaves_nothing(copy, monkeypatch):

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="0 MiB, no space"):
        source_of(copy, "memory")
    assert not [path for path in cache_folder(copy).iterdir() if ".npy" in path.name]


def test_black_images_are_whole_in_a_decoded_array(tmp_path):
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    pixels[2, 7, 7] = 1
    files = {f"train/c/{n}.png": encoded(Image.fromarray(image), "png") for n, image in enumerate(pixels)}
    source, out = write_files(tmp_path / "src", files), tmp_path / "out"
    prepare([find_images(str(source), out=out)], out)
    memory, tar = (source_of(out, name).render(0, 0, np.arange(4)).images for name in ("memory", "tar"))
    assert np.array_equal(memory, tar)


def test_samples_of_a_shard_that_came_back_are_decoded_once_for_all(digits, copy):
    """An array of a folder that was still being copied is not that of the whole folder."""
    (copy / "train-000001.tar").unlink()
    source = source_of(copy, "memory")
    assert source.render(0, 0, np.array([3])).images.any()
    with pytest.raises(DamagedSample, match="is gone"):
        source.render(0, 0, np.array([500]))
    shutil.copy(digits / "train-000001.tar", copy)
    array = np.load(source_of(copy, "memory").source.path)
    assert array[400:800].any(axis=(1, 2, 3)).all()
    assert len(list((copy / ".index").glob("train-*.npy"))) == 1
    (copy / "train-000001.tar").unlink()
    assert source_of(copy, "memory").render(0, 0, np.array([500])).images.any()


def test_images_of_a_shard_that_was_written_later_are_decoded_again(digits, copy):
    """An equal copy whose shards were written last, and one of another sample."""
    whole = np.load(source_of(copy, "memory").source.path)
    (array,) = cache_folder(copy).glob("train-*uint8-1.npy")
    np.save(array, np.zeros_like(whole))
    os.utime(array, (1e9, 1e9))
    assert np.array_equal(np.load(source_of(copy, "memory").source.path), whole)
    damage(digits, copy, {407: "undecodable"})
    assert not np.load(source_of(copy, "memory").source.path)[407].any()
    os.utime(copy / "train-000000.tar", (4e9, 4e9))  # by a clock that is ahead
    first, again = (source_of(copy, "memory").source.path.stat().st_ino for _ in range(2))
    assert first == again
