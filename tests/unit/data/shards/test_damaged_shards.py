"""An index over damaged shards: whole samples keep their numbers, and nothing of it outlives the damage."""

import os
import tarfile

import numpy as np
import pytest
from helpers.damage import WAYS, copy_of, damage
from helpers.images import write_tar

from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.data.splits import check_labels, open_training_index


@pytest.fixture
def whole(digits):
    return open_index(digits, "train")


def read_all(index) -> dict[int, bytes | str]:
    """What each sample gives: its bytes, or why there are none."""
    read = {}
    for sample in range(len(index)):
        try:
            read[sample] = index.read(sample)
        except ReadError as error:
            read[sample] = str(error)
    return read


def assert_whole_but(index, whole, lost) -> None:
    """All samples but these are where they were; these say why not."""
    read, expected = read_all(index), read_all(whole)
    assert {sample for sample, got in read.items() if isinstance(got, str)} == set(lost)
    assert index.lost.tolist() == sorted(lost)
    assert all(read[sample] == expected[sample] for sample in read if sample not in lost)
    known = np.setdiff1d(np.arange(len(whole)), sorted(lost))
    assert np.array_equal(np.asarray(index.labels)[known], np.asarray(whole.labels)[known])


@pytest.mark.parametrize("with_index", [False, True])
def test_five_ways_of_damage_move_nothing(digits, whole, tmp_path, with_index):
    copy = copy_of(digits, tmp_path / "data", with_index=with_index)
    ways = {37 + 97 * number: way for number, way in enumerate(3 * list(WAYS))}
    damage(digits, copy, ways)
    index = open_index(copy, "train", tolerant=True)
    lost = [sample for sample, way in ways.items() if way in ("zero-byte", "missing member")]
    assert index.fingerprint == whole.fingerprint
    assert index.keys() == whole.keys()
    assert np.array_equal(index.labels, whole.labels)
    read, expected = read_all(index), read_all(whole)
    assert index.lost.tolist() == lost
    assert {sample for sample in read if read[sample] != expected[sample]} == set(ways)
    for sample in lost:
        assert read[sample] == WAYS[ways[sample]]
        told = index.damage(sample, read[sample])
        assert (told.key, told.offset is None) == (whole.keys()[sample], ways[sample] == "missing member")


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("cut", [100_000, 818_176, 819_100, 819_200, 820_000, 829_439])
def test_a_tar_cut_short_loses_its_last_samples(digits, whole, tmp_path, cut, with_index):
    """Each takes 2048 bytes: label and image, a header before each."""
    copy = copy_of(digits, tmp_path / "data", with_index=with_index)
    os.truncate(copy / "train-000001.tar", cut)
    index = open_index(copy, "train", tolerant=True)
    ends = whole._rows["offset"] + whole._rows["length"]
    lost = [sample for sample in range(400, 800) if ends[sample] > cut]
    assert abs(len(lost) - max(0, 819_200 - cut) / 2048) < 1
    assert_whole_but(index, whole, lost)
    reasons = {index.why_lost(sample) for sample in lost}
    assert len(reasons) <= 1
    assert all(" is damaged: " in why and " offset " in why for why in reasons)
    # Labels are known where the shard was once seen whole, or still stand before the image.
    unknown = (np.asarray(index.labels)[lost] == -2).sum()
    assert unknown in ((0,) if with_index else (len(lost), len(lost) - 1))


@pytest.mark.parametrize("with_index", [False, True])
def test_a_missing_shard_loses_its_samples_alone(digits, whole, tmp_path, with_index):
    copy = copy_of(digits, tmp_path / "data", with_index=with_index)
    (copy / "train-000001.tar").unlink()
    index = open_index(copy, "train", tolerant=True)
    assert_whole_but(index, whole, range(400, 800))
    told = index.damage(500, index.why_lost(500))
    assert str(told) == "shard train-000001.tar, key ?, offset ?: the shard is missing"


def members_of(path):
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]


def test_a_sample_gone_without_a_trace_is_found_by_an_earlier_index_alone(digits, whole, tmp_path):
    gone = whole.keys()[450]
    for name, with_index in (("known", True), ("unknown", False)):
        copy = copy_of(digits, tmp_path / name, with_index=with_index)
        path = copy / "train-000001.tar"
        members = [(n, data) for n, data in members_of(path) if not n.startswith(f"{gone}.")]
        assert len(members) == 2 * 399
        write_tar(path, members)
        index = open_index(copy, "train", tolerant=True)
        assert_whole_but(index, whole, [450] if with_index else range(400, 800))
        assert index.problems["train-000001.tar"].endswith(" bytes, dataset.json says 829440")


def test_a_label_that_is_no_number_is_one_damaged_sample(digits, whole, tmp_path):
    copy, key = copy_of(digits, tmp_path / "data"), whole.keys()[450]
    path = copy / "train-000001.tar"
    write_tar(path, [(n, b"x" if n == f"{key}.cls" else data) for n, data in members_of(path)])
    index = open_index(copy, "train", tolerant=True)
    assert_whole_but(index, whole, [450])
    assert "its .cls is no class number: b'x'" in index.why_lost(450)


def test_keys_without_an_image_in_shards_of_others_are_no_samples(digits, whole, tmp_path):
    copy = copy_of(digits, tmp_path / "data")
    path = copy / "train-000001.tar"
    write_tar(path, [("a note.txt", b"x"), *members_of(path), ("zz.json", b"{}")])
    assert_whole_but(open_index(copy, "train", tolerant=True), whole, [])


def test_where_damage_is_not_tolerated_headers_that_tell_of_it_are_refused(digits, tmp_path):
    copy = copy_of(digits, tmp_path / "data")
    damage(digits, copy, {450: "zero-byte"})
    assert (copy / "train-000001.tar").stat().st_size == 829_440
    with pytest.raises(InputError, match=rf"shard {copy}/train-000001\.tar holds 1 damaged sample: see"):
        open_index(copy, "train")


def test_more_samples_than_described_are_refused(digits, tmp_path):
    copy = copy_of(digits, tmp_path / "data")
    path = copy / "train-000001.tar"
    write_tar(path, [*members_of(path), ("zz.png", b"x")])
    with pytest.raises(
        InputError, match=r"shard train-000001\.tar holds 401 samples, dataset\.json says 400"
    ):
        open_index(copy, "train", tolerant=True)


def test_mended_shards_are_whole_again(digits, whole, tmp_path):
    copy = copy_of(digits, tmp_path / "data")
    shard, good = copy / "train-000001.tar", (digits / "train-000001.tar").read_bytes()
    found = []
    for content in (good[:100_000], good[:50_000], None, good):
        shard.unlink() if content is None else shard.write_bytes(content)
        index = open_index(copy, "train", tolerant=True)
        found.append(len(index.lost))
        if content is not None and content is not good:
            with pytest.raises(InputError):
                open_index(copy, "train")
    assert found == [351, 376, 400, 0]
    assert_whole_but(index, whole, [])
    assert [path.name for path in (copy / ".index").glob("train-*.npy")] == [
        f"train-{whole.fingerprint[:16]}.npy"
    ]
    assert_whole_but(open_index(copy, "train"), whole, [])


def test_damage_is_not_searched_for_twice(digits, tmp_path, monkeypatch):
    copy = copy_of(digits, tmp_path / "data")
    os.truncate(copy / "train-000001.tar", 100_000)
    first = open_index(copy, "train", tolerant=True)
    with monkeypatch.context() as patch:
        patch.setattr("mae_vit.data.shards.index_files.read_rows", None)
        again = open_index(copy, "train", tolerant=True)
    assert (again.lost.tolist(), again.problems) == (first.lost.tolist(), first.problems)
    # But damage that has come since is found.
    os.truncate(copy / "train-000003.tar", 100_000)
    assert len(open_index(copy, "train", tolerant=True).lost) > len(first.lost)


def test_damaged_notes_are_made_anew(digits, tmp_path):
    copy = copy_of(digits, tmp_path / "data")
    os.truncate(copy / "train-000001.tar", 100_000)
    expected = open_index(copy, "train", tolerant=True).lost.tolist()
    (notes,) = (copy / ".index").glob("train-*-notes.json")
    for content in ("", "[]", '{"shards": {"1": 3}, "samples": {}}', None):
        notes.unlink() if content is None else notes.write_text(content)
        assert open_index(copy, "train", tolerant=True).lost.tolist() == expected


def test_shards_that_are_newer_than_their_index_are_looked_at(digits, whole, tmp_path):
    """Another order of the same samples has the same size; a copy of the same bytes is the same."""
    copy = copy_of(digits, tmp_path / "data", with_index=True)
    path = copy / "train-000001.tar"
    os.utime(path)
    assert_whole_but(open_index(copy, "train"), whole, [])
    members = members_of(path)
    write_tar(path, [*members[2:], *members[:2]])
    assert path.stat().st_size == 829_440
    for tolerant in (False, True):
        index = open_index(copy, "train", tolerant=tolerant)
        assert_whole_but(index, whole, [])
        assert index.keys() == whole.keys()


def test_the_budget_counts_before_training_begins(digits, tmp_path, capsys):
    copy = copy_of(digits, tmp_path / "data")
    os.truncate(copy / "train-000001.tar", 800_000)
    (copy / "train-000002.tar").write_bytes(b"")
    lost = 400 + 10
    with pytest.raises(InputError) as raised:
        open_training_index(copy, "train", damage_budget=(lost - 0.5) / 1497, say=True)
    text = str(raised.value)
    assert text.startswith(
        f'{lost} of 1,497 samples of split "train" cannot be read, data.damage_budget=0.27'
    )
    assert f"allows {lost - 1}: shard {copy}/train-000001.tar is damaged: " in text
    assert f"; shard {copy}/train-000002.tar is damaged: empty file: see `mae-vit check {copy}`" in text
    assert capsys.readouterr().err == ""
    index = open_training_index(copy, "train", damage_budget=lost / 1497, say=True)
    assert len(index.lost) == lost
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {lost} of 1,497 samples of split")
    open_training_index(copy, "train", damage_budget=lost / 1497, say=False)
    assert capsys.readouterr().err == ""


def test_lost_labels_are_told_where_samples_are_chosen_by_them(digits, whole, tmp_path):
    copy = copy_of(digits, tmp_path / "data")
    os.truncate(copy / "train-000001.tar", 800_000)
    index = open_index(copy, "train", tolerant=True)
    with pytest.raises(
        InputError, match=r"labels of 9 samples .* are lost.*train-000001\.tar, .*: the shard is damaged"
    ):
        check_labels(index)
    with pytest.raises(InputError, match=r"keys of the samples cannot be read: shard .*train-000001\.tar"):
        index.keys()
    seen_whole = copy_of(digits, tmp_path / "seen_whole", with_index=True)
    os.truncate(seen_whole / "train-000001.tar", 800_000)
    check_labels(open_index(seen_whole, "train", tolerant=True))


def test_keys_of_long_names_and_of_two_samples_alike(tmp_path, digits):
    """The name of a member may stand in blocks before its header."""
    copy = copy_of(digits, tmp_path / "data")
    path = copy / "train-000001.tar"
    names = {f"{'long' * 40}/{n // 2}": data for n, (_, data) in enumerate(members_of(path)) if n % 2}
    write_tar(path, [(f"{name}.png", data) for name, data in names.items()])
    index = open_index(copy, "train", tolerant=True)
    assert index.damage(403, "why").key == f"{'long' * 40}/3"
