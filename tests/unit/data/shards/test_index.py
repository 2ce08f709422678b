"""The index: the same samples as webdataset sees, from any kind of tar, safely."""

import io
import os
import tarfile

import numpy as np
import pytest
import webdataset as wds
from helpers.batch_digests import open_digits
from helpers.damage import description
from helpers.images import write_tar
from webdataset.tariterators import base_plus_ext

from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.batches.loader import FixedBatches
from mae_vit.data.index import ShardIndex, open_index, open_whole_index
from mae_vit.data.shards.dataset_json import file_digest, read_dataset
from mae_vit.data.shards.index_files import index_shard
from mae_vit.data.shards.samples import split_key
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.data.shards.tar_headers import DamagedTar, walk_tar

LONG = "a/" + "long" * 60 + "/x.y"


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_members_as_tarfile_sees_them(tmp_path, kind):
    name = LONG if kind != tarfile.USTAR_FORMAT else "d" * 120 + "/" + "n" * 80 + ".jpg"
    members = [("a/1.jpg", b"x" * 700), (name, b"y" * 512), ("ü/2.cls", b"3"), ("empty.jpg", b"")]
    write_tar(tmp_path / "t.tar", members, format=kind)
    with tarfile.open(tmp_path / "t.tar") as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers()]
    assert [(m.name, m.offset, m.size) for m in walk_tar(tmp_path / "t.tar")] == expected


@pytest.mark.parametrize(
    "change",
    [
        *(lambda data: data[:1200], lambda data: data[:100] + b"\xff" + data[101:]),
        *(lambda data: b"\x1f\x8b" + data[2:], lambda data: b""),
    ],
    ids=["cut short", "checksum", "compressed", "empty"],
)
def test_damage_is_an_error_with_its_place(tmp_path, change, said):
    write_tar(tmp_path / "t.tar", [("a/1.jpg", b"x" * 2000)])
    (tmp_path / "t.tar").write_bytes(change((tmp_path / "t.tar").read_bytes()))
    with pytest.raises(DamagedTar) as error:
        list(walk_tar(tmp_path / "t.tar"))
    said(error)


@pytest.mark.parametrize(
    "record", [b"12 size=abc\n", b"1 path=x\n", b"0 path=x\n", b"-3 path=x\n", b"99 path=x\n", b"8 path\n"]
)
def test_bad_pax_records_are_damage(tmp_path, record):
    header, image = tarfile.TarInfo("x"), tarfile.TarInfo("c/a.png")
    header.type, header.size, image.size = b"x", len(record), 3
    blocks = [header.tobuf(tarfile.USTAR_FORMAT), record, image.tobuf(tarfile.USTAR_FORMAT), b"abc"]
    (tmp_path / "t.tar").write_bytes(b"".join(b + bytes(-len(b) % 512) for b in blocks) + bytes(1024))
    with pytest.raises(DamagedTar, match="offset"):
        list(walk_tar(tmp_path / "t.tar"))


def test_links_have_no_bytes_and_global_records_hold(tmp_path):
    with tarfile.open(
        tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "c/g.jpg"}
    ) as tar:
        link = tarfile.TarInfo("c/link.jpg")
        link.type, link.linkname, link.size = tarfile.LNKTYPE, "c/a.jpg", 700
        # As some archivers write it: a size in the header, and nothing behind.
        tar.fileobj.write(link.tobuf(tarfile.USTAR_FORMAT))
        tar.offset += 512
        image = tarfile.TarInfo("c/a.jpg")
        image.size = 3
        tar.addfile(image, io.BytesIO(b"abc"))
    with tarfile.open(tmp_path / "t.tar") as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]
    assert (
        [(m.name, m.offset, m.size) for m in walk_tar(tmp_path / "t.tar")]
        == expected
        == [("c/g.jpg", 2048, 3)]
    )


def test_stored_keys_are_read_without_a_lock(digits, monkeypatch):
    index, taken = open_index(digits, "train"), []
    lock = ShardIndex.locked

    def counted(self):
        taken.append(self.split)
        return lock(self)

    monkeypatch.setattr(ShardIndex, "locked", counted)
    first, *others = (index.keys() for _ in range(3))
    assert all(keys == first for keys in others)
    assert len(taken) <= 1
    index.cache_path("keys.json").write_text("[]")
    taken.clear()
    assert index.keys() == first
    assert taken == [index.split]


def test_keys_split_as_webdataset_splits_them():
    assert split_key("a.b/c.d.jpg") == ("a.b/c", "d.jpg")
    assert split_key("x/001.JPG") == ("x/001", "jpg")
    # To webdataset, the key is "x/".
    assert split_key("x/._1.jpg") == ("", "")
    for name in ("README", ".jpg", "__index__"):
        key, extension = base_plus_ext(name)
        own = split_key(name)
        # webdataset has None where a file belongs to no sample, and skips __names__ before.
        assert own == ("", "") if key is None or name.startswith("__") else own == (key, extension)


def test_files_of_no_sample_do_not_part_one(tmp_path):
    """An image, a file without extension, its class: one sample to webdataset, and to us."""
    members = [("a.jpg", b"1"), ("README", b"x"), ("__meta__/b.jpg", b"x"), ("a.cls", b"3"), (".jpg", b"22")]
    write_tar(tmp_path / "t.tar", members)
    samples = list(wds.WebDataset(str(tmp_path / "t.tar"), shardshuffle=False))
    assert [(s["__key__"], s["jpg"], s["cls"]) for s in samples] == [("a", b"1", b"3")]
    rows = index_shard(tmp_path / "t.tar", 0)
    assert (rows["label"].tolist(), rows["length"].tolist()) == ([3], [1])
    members = [("a.jpg", b"1"), ("a.cls", b"4"), ("b.txt", b"no image"), ("c.cls", b"7"), ("c.png", b"33")]
    write_tar(tmp_path / "t.tar", members)
    rows = index_shard(tmp_path / "t.tar", 5)
    assert rows["label"].tolist() == [4, 7]
    assert rows["length"].tolist() == [1, 2]
    assert rows["shard"].tolist() == [5, 5]


def test_reads_what_tarfile_reads(digits):
    index = open_index(digits, "train")
    with tarfile.open(digits / index.split_info.shards[1].file) as tar:
        images = [m for m in tar.getmembers() if m.name.endswith(".png")]
        labels = {m.name: int(tar.extractfile(m).read()) for m in tar.getmembers() if m.name.endswith(".cls")}
        first = index.split_info.shards[0].samples
        for number, member in enumerate(images[:20]):
            assert index.read(first + number) == tar.extractfile(member).read()
            assert index.labels[first + number] == labels[member.name.replace(".png", ".cls")]
        assert str(index.damage(first, "why")) == (
            f"shard {index.split_info.shards[1].file}, key {images[0].name[:-4]}, "
            f"offset {images[0].offset_data}: why"
        )


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_later_workers_read_no_other_index(copy, change):
    source, path = open_digits(open_index(copy, "train"), "tar"), copy / "train-index.npy"
    batches = FixedBatches(source, np.arange(8), seed=0, batch_size=8, workers=1)
    assert len(list(batches)) == 1
    rows = np.load(path)[::-1]
    # Clusters remove files that are old: people touch theirs.
    os.utime(path, (1e9, 1e9))
    assert len(list(batches)) == 1
    path.unlink()
    if change == "replaced":
        np.save(path, rows)
    with pytest.raises(InputError, match=rf"^{path} was replaced or removed while"):
        list(batches)


def test_what_was_derived_from_other_shards_goes(copy):
    before = open_index(copy, "train")
    open_digits(before, "memory")
    others = {copy / ".index" / name for name in (".train.lock", "train-more-0123456789abcdef-uint8-1.npy")}
    (copy / ".index" / "train-0123456789abcdef.npy").touch()
    for path in others:
        path.touch()
    with description(copy) as described:
        dropped = described["splits"]["train"]["shards"].pop()
        described["splits"]["train"]["samples"] -= dropped["samples"]
    (copy / dropped["file"]).unlink()
    with pytest.raises(InputError, match=r"train-index\.npy .*1,200"):
        open_index(copy, "train")
    assert main(["prepare", "--in-place", str(copy), "--overwrite"]) == 0
    after = open_index(copy, "train")
    assert after.fingerprint != before.fingerprint
    assert len(after) == len(before) - dropped["samples"]
    np.testing.assert_array_equal(after.labels, before.labels[: len(after)])
    open_digits(after, "memory")
    assert set((copy / ".index").iterdir()) == {*others, after.cache_path("uint8-1.npy")}


@pytest.mark.parametrize("content", ["nothing", "another array", "one bit", "rows of other shards"])
def test_an_index_that_is_not_that_of_the_shards_is_refused_and_made_anew(copy, content, capsys):
    expected, path = open_index(copy, "train").read(3), copy / "train-index.npy"
    data = path.read_bytes()
    if content == "nothing":
        path.unlink()
    elif content == "another array":
        np.save(path, np.zeros(7))
    elif content == "one bit":
        path.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    else:
        rows = np.load(io.BytesIO(data))
        rows["offset"][5] = 10**9
        np.save(path, rows)
        with description(copy) as described:
            described["splits"]["train"]["index"]["sha256"] = file_digest(path)
    with pytest.raises(
        InputError, match=rf"^index {path} .*`mae-vit prepare --in-place {copy} --overwrite`$"
    ):
        open_index(copy, "train")
    assert main(["check", str(copy)]) == 1
    assert "damaged: train-index.npy " in capsys.readouterr().out
    assert main(["prepare", "--in-place", str(copy), "--overwrite"]) == 0
    assert path.read_bytes() == data
    assert open_index(copy, "train").read(3) == expected
    assert main(["check", str(copy)]) == 0


def test_of_a_large_index_size_and_type_are_looked_at(copy, monkeypatch):
    """To read all of it takes seconds at 100 million samples; each image is compared with its header anyway."""
    monkeypatch.setattr("mae_vit.data.index._COMPARED_BYTES", 100)
    path = copy / "train-index.npy"
    rows = np.load(path)
    rows["offset"][5] += 512
    np.save(path, rows)
    index = open_index(copy, "train")
    with pytest.raises(ReadError, match="another sample"):
        index.read(5)
    path.write_bytes(path.read_bytes()[:-24])
    with pytest.raises(InputError, match=r"has \d+ bytes"):
        open_index(copy, "train")


def test_a_description_that_contradicts_itself_is_named(copy, capsys):
    with description(copy) as described:
        described["splits"]["train"]["samples"] += 1
    with pytest.raises(InputError, match=r"dataset\.json of"):
        open_index(copy, "train")
    assert main(["check", str(copy)]) == 1
    assert "damaged: dataset.json" in capsys.readouterr().out


def test_the_last_shard_is_among_those_looked_at(copy, monkeypatch):
    monkeypatch.setattr("mae_vit.data.shards.shard_files._MAX_STATTED_SHARDS", 2)
    last = read_dataset(copy).splits["train"].shards[-1].file
    (copy / last).unlink()
    with pytest.raises(InputError, match=f"{last} is missing"):
        open_whole_index(copy, "train")


def test_what_is_derived_from_read_only_data_lies_elsewhere(copy, tmp_path, monkeypatch):
    (copy / ".index").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(open_index(copy, "train").keys()) == read_dataset(copy).splits["train"].samples
    assert list((tmp_path / "cache").rglob("train-*-keys.json"))
