"""Subsets, shares, limits and held-out images: by key, nested, balanced."""

import itertools
import random
from fractions import Fraction

import pytest
from helpers.images import encoded, picture, read_back, write_files

from mae_vit.cli.main import main
from mae_vit.core.keyed_rng import SUBSET_HASH, hash_key
from mae_vit.data.prepare.entries import Entry
from mae_vit.data.prepare.selection import Selection, draw_holdout
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.shards.dataset_json import read_dataset


def entries(count: int = 60, classes: int = 3, split: str = "train") -> list[Entry]:
    return [
        Entry(
            split, f"c{n % classes}", f"c{n % classes}/{n}", f"{split}/c{n % classes}/{n}.png", "png", bytes
        )
        for n in range(count)
    ]


def taken(selection: Selection, listed: list[Entry]) -> set[str]:
    return {entry.key for entry in selection.apply({"train": listed})["train"]}


def test_keys_that_are_no_utf_8_are_drawn_too():
    """Shards that are taken as they lie name their samples as they like."""
    assert hash_key(b"caf\xe9".decode("utf-8", "surrogateescape"), SUBSET_HASH) != hash_key(
        "caf", SUBSET_HASH
    )


def test_shares_are_nested_balanced_and_blind_to_the_order_of_listing():
    listed = entries(300)
    shuffled = random.Random(0).sample(listed, len(listed))
    shares = [Fraction(1, 100), Fraction(1, 10), Fraction(1, 3), Fraction(1)]
    sets = [taken(Selection(fraction=share), listed) for share in shares]
    assert [len(keys) for keys in sets] == [3, 30, 102, 300]
    for smaller, larger in itertools.pairwise(sets):
        assert smaller < larger
    for share, keys in zip(shares, sets, strict=True):
        assert taken(Selection(fraction=share), shuffled) == keys
        for name in ("c0", "c1", "c2"):
            assert sum(key.startswith(name) for key in keys) == len(keys) / 3
    # Other images of other classes change nothing.
    more = [*listed, *(e for e in entries(900, 9) if e.class_name not in ("c0", "c1", "c2"))]
    assert {
        key for key in taken(Selection(fraction=shares[1]), more) if key[:2] in ("c0", "c1", "c2")
    } == sets[1]


def test_a_draw_is_not_the_first_files():
    listed = entries(300, 1)
    drawn = taken(Selection(fraction=Fraction(1, 10)), listed)
    assert drawn != {entry.key for entry in listed[:30]}
    assert drawn != set(sorted(entry.key for entry in listed)[:30])


def test_a_limit_is_of_each_class_and_nested_in_the_same_order():
    listed = entries(300)
    three, ten = (taken(Selection(limit_per_class=n), listed) for n in (3, 10))
    assert (len(three), len(ten)) == (9, 30)
    assert three < ten
    assert ten == taken(Selection(fraction=Fraction(1, 10)), listed)


def test_held_out_images_are_balanced_disjoint_and_the_same_for_every_share():
    listed = entries(300)
    train, drawn = draw_holdout(listed, Fraction(1, 10), "val")
    assert {entry.split for entry in drawn} == {"val"}
    assert [sum(e.class_name == f"c{n}" for e in drawn) for n in range(3)] == [10, 10, 10]
    assert {e.key for e in train} | {e.key for e in drawn} == {e.key for e in listed}
    assert not {e.key for e in train} & {e.key for e in drawn}
    for fraction in (None, Fraction(1, 10), Fraction(1, 3)):
        found = Selection(holdout=Fraction(1, 10), fraction=fraction).apply({"train": listed})
        assert [e.key for e in found["val"]] == [e.key for e in drawn]
    lone = entries(3)
    assert draw_holdout(lone, Fraction(9, 10), "val")[0] == lone, "a class keeps an image"


def test_val_and_test_stay_whole():
    splits = {"train": entries(), "val": entries(split="val"), "test": entries(split="test")}
    found = Selection(fraction=Fraction(1, 10), limit_per_class=1).apply(splits)
    assert (len(found["train"]), len(found["val"]), len(found["test"])) == (3, 60, 60)


@pytest.fixture
def source(tmp_path):
    files = {
        f"{split}/{name}/{number}.{name}.png": encoded(picture(number), "png")
        for split in ("train", "test")
        for name in ("cat", "dog")
        for number in range(4)
    }
    return write_files(tmp_path / "src", files)


def test_classes_without_an_image_are_named(source, tmp_path, capsys):
    (tmp_path / "list.txt").write_text("cat/1_cat\ncat/2_cat")
    assert main(["prepare", str(source), str(tmp_path / "out"), "--subset", str(tmp_path / "list.txt")]) == 0
    assert (
        "train: 2 images in 1 shard\n  1 class of 2 without an image in it: dog\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["cat/1_cat", "./dog/2_dog", ""], {"cat/1_cat", "dog/2_dog"}),
        (["train/cat/1.cat.png", "cat/3.cat.png"], {"cat/1_cat", "cat/3_cat"}),
        (["0.dog.png"], {"dog/0_dog"}),
    ],
)
def test_a_list_names_keys_paths_or_files(source, tmp_path, lines, expected):
    (tmp_path / "list.txt").write_text("\n".join(lines))
    out = tmp_path / "out"
    assert main(["prepare", str(source), str(out), "--subset", str(tmp_path / "list.txt")]) == 0
    assert set(read_back(out)) == expected
    assert len(read_back(out, "test")) == 8
    splits = read_dataset(out).splits
    assert {name: split.processing.subset for name, split in splits.items()} == {
        "train": "list.txt",
        "test": None,
    }


def test_a_list_may_name_test_images_by_path(source, tmp_path):
    (tmp_path / "list.txt").write_text("test/cat/1.cat.png\ncat/0_cat\n")
    assert main(["prepare", str(source), str(tmp_path / "out"), "--subset", str(tmp_path / "list.txt")]) == 0
    assert set(read_back(tmp_path / "out")) == {"cat/0_cat"}
    assert set(read_back(tmp_path / "out", "test")) == {"cat/1_cat"}
    splits = read_dataset(tmp_path / "out").splits
    assert {split.processing.subset for split in splits.values()} == {"list.txt"}


BAD = {
    "an unknown line": (
        ["--subset", "{tmp}/bad.txt"],
        '1 of 2 lines name no sample, first "train/cat/9.cat.png"; did',
    ),
    "an empty list": (["--subset", "{tmp}/empty.txt"], "names no sample"),
    "no list": (["--subset", "{tmp}/none.txt"], "no such file"),
    "several files of a name": (["--subset", "{tmp}/two.txt"], '"same.png" names 2 images: give paths'),
    "a share over 1": (["--fraction", "3/2"], "--fraction 3/2: over 0, at most 1"),
    "a share of 0": (["--holdout", "0"], "--holdout 0: over 0"),
    "all held out": (["--holdout", "1"], "--holdout 1: below 1"),
    "no share": (["--fraction", "some"], "'some' is no share such as 0.1 or 1/10"),
    "nothing held out": (
        ["--holdout", "1/100"],
        "--holdout 1/100 of each class is no image: the largest has ",
    ),
    "limit 0": (["--limit-per-class", "0"], "--limit-per-class 0: at least 1"),
    "limit without labels": (["--no-labels", "--limit-per-class", "1"], "have no labels: use --fraction"),
    "quality alone": (["--quality", "50"], "--quality changes nothing without"),
    "quality 101": (["--resize", "8", "--quality", "101"], "--quality 101: 1 to 100"),
    "too many pixels": (["--max-pixels", "200000000"], "training decodes at most 178956970"),
    "workers -1": (["--workers", "-1"], "--workers -1: at least 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_choices_are_one_line_and_write_nothing(source, tmp_path, capsys, name):
    write_files(source, {f"train/{name}/same.png": encoded(picture(), "png") for name in ("cat", "dog")})
    write_files(
        tmp_path,
        {"bad.txt": b"train/cat/9.cat.png\ncat/1_cat", "empty.txt": b"\n \n", "two.txt": b"same.png"},
    )
    arguments, expected = BAD[name]
    arguments = [part.format(tmp=tmp_path) for part in arguments]
    assert main(["prepare", str(source), str(tmp_path / "out"), *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert expected in lines[0]
    assert not (tmp_path / "out").exists()


def test_choices_are_written_down_and_a_second_val_is_refused(source, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--holdout", "1/4", "--fraction", "0.5", "--limit-per-class", "1"]
    assert main(["prepare", str(source), str(out), *options]) == 0
    splits = read_dataset(out).splits
    assert {name: split.samples for name, split in splits.items()} == {"train": 2, "val": 2, "test": 8}
    assert splits["val"].class_counts == [1, 1]
    train, val, test = (splits[name].processing for name in ("train", "val", "test"))
    assert (train.fraction, train.limit_per_class, train.holdout) == ("1/2", 1, "1/4")
    assert (val.fraction, val.holdout) == (None, "1/4")
    assert (test.fraction, test.holdout) == (None, None)
    assert main(["check", str(out)]) == 0
    (source / "test").rename(source / "val")
    assert main(["prepare", str(source), str(tmp_path / "b"), "--holdout", "1/4"]) == 2
    assert 'draws a split "val", but the sources have one' in capsys.readouterr().err


def test_held_out_images_of_a_list_say_so(source, tmp_path):
    (tmp_path / "list.txt").write_text(
        "\n".join(f"{name}/{n}_{name}" for name in ("cat", "dog") for n in range(3))
    )
    arguments = [
        str(source),
        str(tmp_path / "out"),
        "--subset",
        str(tmp_path / "list.txt"),
        "--holdout",
        "1/3",
    ]
    assert main(["prepare", *arguments]) == 0
    splits = read_dataset(tmp_path / "out").splits
    assert {name: split.samples for name, split in splits.items()} == {"train": 4, "val": 2, "test": 8}
    assert {name for name, split in splits.items() if split.processing.subset} == {"train", "val"}


def test_digits_are_split_by_class():
    found = find_images("digits", out=None).entries
    for name in map(str, range(10)):
        mine = [entry.split for entry in found if entry.class_name == name]
        assert abs(mine.count("test") - len(mine) / 6) <= 0.5
