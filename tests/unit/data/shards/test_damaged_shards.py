"""Shards that are damaged, cut short, gone or exchanged: whole samples are read, others reported; `check` names all."""

import os
import shutil
import tarfile

import numpy as np
import pytest
from helpers.damage import WAYS, copy_of, damage, description, known_key
from helpers.images import write_tar

from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index, open_training_index
from mae_vit.data.shards import shard_files
from mae_vit.data.shards.dataset_json import file_digest
from mae_vit.data.shards.shard_files import ReadError

pytestmark = pytest.mark.usefixtures("impatient")
ANOTHER = "the shard contains another sample there"


@pytest.fixture
def whole(digits):
    return open_index(digits, "train")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(shard_files, "_WAITS_S", (0.0, 0.01))


def read_all(index) -> dict[int, bytes | str]:
    """What each sample gives: its bytes, or why there are none."""
    read = {}
    for sample in range(len(index)):
        try:
            read[sample] = index.read(sample)
        except ReadError as error:
            read[sample] = str(error)
    return read


def assert_whole_but(index, whole, lost) -> set[str]:
    """All samples but these are where they were; returns why these are not. Labels are known of all."""
    read, expected = read_all(index), read_all(whole)
    assert {sample for sample, got in read.items() if isinstance(got, str)} == set(lost)
    assert all(read[sample] == expected[sample] for sample in read if sample not in lost)
    assert np.array_equal(index.labels, whole.labels)
    assert index.fingerprint == whole.fingerprint
    return {read[sample] for sample in lost}


def test_five_ways_of_damage_move_nothing(digits, copy, whole):
    ways = {37 + 97 * number: way for number, way in enumerate(3 * list(WAYS))}
    damage(digits, copy, ways)
    index = open_index(copy, "train")
    read, expected = read_all(index), read_all(whole)
    assert {sample for sample in read if read[sample] != expected[sample]} == set(ways)
    for sample, way in ways.items():
        entry = index.damage(sample, "why")
        assert (entry.key, entry.offset) == (
            known_key(whole.keys()[sample], way),
            whole._rows["offset"][sample],
        )
        assert isinstance(read[sample], str) == (way == "another sample")


@pytest.mark.parametrize("cut", [0, 100_000, 819_100, 829_439])
def test_a_shard_cut_short_loses_its_last_samples(copy, whole, cut):
    """Each takes 2048 bytes: label and image, a header before each."""
    os.truncate(copy / "train-000001.tar", cut)
    index = open_index(copy, "train")
    ends = whole._rows["offset"] + whole._rows["length"]
    lost = [sample for sample in range(400, 800) if ends[sample] > cut]
    assert abs(len(lost) - max(0, 819_200 - cut) / 2048) < 1
    reasons = assert_whole_but(index, whole, lost)
    assert len(reasons) == bool(lost)
    assert all(f"{cut:,} of 829,440" in reason for reason in reasons)
    assert index.missing_samples()[0].tolist() == lost


def test_a_shard_that_grew_is_not_read(copy, whole):
    with open(copy / "train-000001.tar", "ab") as file:
        file.write(bytes(512))
    index = open_index(copy, "train")
    reasons = assert_whole_but(index, whole, range(400, 800))
    assert len(reasons) == 1
    assert "829,952" in reasons.pop()
    assert len(index.missing_samples()[0]) == 400


def members_of(path):
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]


def test_samples_that_changed_places_are_not_taken_for_each_other(copy, whole):
    """Another order of the same samples has the same size, and an image of the same length where one was."""
    path = copy / "train-000001.tar"
    members = members_of(path)
    write_tar(path, [*members[2:4], *members[:2], *members[4:]])
    assert path.stat().st_size == 829_440
    assert assert_whole_but(open_index(copy, "train"), whole, [400, 401]) == {ANOTHER}
    assert main(["prepare", "--in-place", str(copy), "--overwrite"]) == 0
    index = open_index(copy, "train")
    assert [index.read(400), index.read(401)] == [whole.read(401), whole.read(400)]
    assert index.keys()[400:402] == whole.keys()[401:399:-1]
    assert index.fingerprint != whole.fingerprint


LONG = {
    "GNU": (tarfile.GNU_FORMAT, "long" * 40 + "/{}"),
    "pax": (tarfile.PAX_FORMAT, "long" * 40 + "/{}"),
    "ustar": (tarfile.USTAR_FORMAT, "long" * 30 + "/{}"),
    "pax, short": (tarfile.PAX_FORMAT, "größer/{}"),
}


@pytest.mark.parametrize("kind", LONG)
def test_names_in_blocks_before_a_header_are_no_damage(copy, whole, kind):
    form, name = LONG[kind]
    path, images = copy / "train-000001.tar", [whole.read(sample) for sample in range(400, 440)]
    write_tar(path, [(f"{name.format(n)}.png", image) for n, image in enumerate(images)], format=form)
    assert main(["prepare", "--in-place", str(copy), "--overwrite"]) == 0
    index = open_index(copy, "train")
    assert [index.read(400 + n) for n in range(40)] == images
    assert index.keys()[400:440] == [name.format(n) for n in range(40)]
    assert index.damage(403, "why").key == name.format(3)


def test_the_budget_counts_before_training_begins(copy, capsys, said):
    os.truncate(copy / "train-000001.tar", 800_000)
    (copy / "train-000002.tar").unlink()
    lost = 400 + 10
    with pytest.raises(InputError) as raised:
        open_training_index(copy, "train", damage_budget=(lost - 0.5) / 1497, say=True)
    said(raised)
    assert capsys.readouterr().err == ""
    open_training_index(copy, "train", damage_budget=lost / 1497, say=True)
    assert capsys.readouterr().err.startswith(f"warning: {lost} of 1,497")
    open_training_index(copy, "train", damage_budget=lost / 1497, say=False)
    assert capsys.readouterr().err == ""


def test_keys_are_needed_of_all_samples(digits, whole, tmp_path):
    for name, expected in (
        ("cut", "cannot be read"),
        ("exchanged", "contains other"),
    ):
        copy = copy_of(digits, tmp_path / name)
        if name == "cut":
            os.truncate(copy / "train-000001.tar", 800_000)
        else:
            shutil.copy(digits / "train-000001.tar", copy / "train-000002.tar")
        with pytest.raises(InputError, match=rf"\.tar {expected}"):
            open_index(copy, "train").keys()
        assert not list(copy.rglob("*keys.json"))
    seen = copy_of(digits, tmp_path / "seen")
    assert open_index(seen, "train").keys() == whole.keys()
    (seen / "train-000001.tar").unlink()
    # Read once, they outlast their shards.
    assert open_index(seen, "train").keys() == whole.keys()


def test_missing_and_truncated_shards(copy, capsys):
    (copy / "train-000000.tar").unlink()
    path = copy / "test-000000.tar"
    path.write_bytes(path.read_bytes()[:-4000])
    assert main(["check", str(copy)]) == 1
    output = capsys.readouterr().out
    assert "train-000000.tar: " in output
    assert "test-000000.tar: " in output


def test_a_class_without_a_name_is_found(copy, capsys):
    with description(copy) as described:
        described["classes"].pop()
    assert main(["check", str(copy)]) == 1
    assert "class 9" in capsys.readouterr().out


def test_an_index_that_says_other_samples_is_found(copy, capsys, said):
    path = copy / "train-index.npy"
    rows = np.load(path)
    rows["label"][401] ^= 1
    np.save(path, rows)
    with description(copy) as described:
        described["splits"]["train"]["index"]["sha256"] = file_digest(path)
    assert main(["check", str(copy)]) == 1
    said(capsys.readouterr().out)


def test_the_count_and_the_names_read_well(copy, capsys, said):
    path = copy / "train-000002.tar"
    data = bytearray(path.read_bytes())
    data[600] ^= 1  # in an image, not in a header
    path.write_bytes(data)
    assert main(["check", str(copy)]) == 1
    said(capsys.readouterr().out)
    path.write_bytes(b"x" * 512 + bytes(data[512:]))
    assert main(["check", str(copy)]) == 1
    said(capsys.readouterr().out)
