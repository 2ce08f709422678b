"""Shares, limits and held-out images: by key, nested, balanced."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from helpers.images import encoded, picture, write_files

from mae_vit.data.prepare.entries import Entry
from mae_vit.data.prepare.selection import Selection, draw_holdout


def entries(count: int = 60, classes: int = 3, split: str = "train") -> list[Entry]:
    keys = [(f"c{n % classes}", f"c{n % classes}/{n}") for n in range(count)]
    return [Entry(split, name, key, f"{split}/{key}.png", "png", bytes) for name, key in keys]


def taken(selection: Selection, listed: list[Entry]) -> set[str]:
    return {entry.key for entry in selection.apply({"train": listed})["train"]}


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
    # Not the first files; and other images of other classes change nothing.
    assert sets[1] != {entry.key for entry in listed[:30]}
    more = [*listed, *(e for e in entries(900, 9) if e.class_name not in ("c0", "c1", "c2"))]
    drawn = taken(Selection(fraction=shares[1]), more)
    assert {key for key in drawn if key[:2] in ("c0", "c1", "c2")} == sets[1]


def test_a_limit_is_of_each_class_and_nested_in_the_same_order():
    listed = entries(300)
    three, ten = (taken(Selection(limit_per_class=n), listed) for n in (3, 10))
    assert (len(three), len(ten)) == (9, 30)
    assert three < ten
    assert ten == taken(Selection(fraction=Fraction(1, 10)), listed)
    unlabeled = [replace(entry, key=f"u{entry.key}", class_name=None) for entry in listed]
    both = taken(Selection(limit_per_class=3), [*unlabeled, *listed])
    assert both == three | {entry.key for entry in unlabeled}, "images without labels stay"


def test_held_out_images_are_balanced_disjoint_and_the_same_for_every_share():
    listed = entries(300)
    train, drawn = draw_holdout(listed, Fraction(1, 10), "val")
    assert {entry.split for entry in drawn} == {"val"}
    assert [sum(e.class_name == f"c{n}" for e in drawn) for n in range(3)] == [10, 10, 10]
    assert {e.key for e in train} | {e.key for e in drawn} == {e.key for e in listed}
    assert not {e.key for e in train} & {e.key for e in drawn}
    for fraction in (None, Fraction(1, 10), Fraction(1, 3)):
        chosen = Selection(holdout=Fraction(1, 10), fraction=fraction).apply({"train": listed})
        assert [e.key for e in chosen["val"]] == [e.key for e in drawn]
    lone = entries(3)
    assert draw_holdout(lone, Fraction(9, 10), "val")[0] == lone, "a class keeps an image"


def test_val_and_test_stay_whole():
    splits = {"train": entries(), "val": entries(split="val"), "test": entries(split="test")}
    chosen = Selection(fraction=Fraction(1, 10), limit_per_class=1).apply(splits)
    assert [len(chosen[name]) for name in splits] == [3, 60, 60]


@pytest.fixture
def source(tmp_path):
    names = [
        f"{split}/{name}/{number}.{name}.png"
        for split in ("train", "test")
        for name in ("cat", "dog")
        for number in range(4)
    ]
    files = {name: encoded(picture(number, (8, 8)), "png") for number, name in enumerate(names)}
    return write_files(tmp_path / "src", files)


BAD = [
    "--fraction 3/2", "--holdout 0", "--holdout 1", "--fraction some", "--holdout 1/100", "--limit-per-class 0",
    "--no-labels --limit-per-class 1", "--quality 50", "--resize 8 --quality 101",
    "--workers -1",
]  # fmt: skip


@pytest.mark.parametrize("options", BAD)
def test_bad_choices_are_one_line_and_write_nothing(source, call, said, options):
    result = call(source, options=options)
    said(result.text)
    assert (result.code, len(result.text.splitlines()), result.out.exists()) == (2, 1, False)


def test_choices_are_written_down_and_a_second_val_is_refused(source, call):
    result = call(source, options="--holdout 1/4 --fraction 0.5 --limit-per-class 1")
    assert [info.class_counts for info in result.dataset.splits.values()] == [[4, 4], [1, 1], [1, 1]]
    splits = result.dataset.splits
    train, val, test = (splits[name].processing for name in ("train", "val", "test"))
    assert (train.fraction, train.limit_per_class, train.holdout) == ("1/2", 1, "1/4")
    assert (val.fraction, val.holdout) == (None, "1/4")
    assert (test.fraction, test.holdout) == (None, None)
    (source / "test").rename(source / "val")
    assert call(source, options="--holdout 1/4", out="c").code == 2


def test_empty_files_are_no_copies_of_one_another(call):
    images = {
        f"{name}/{n}.png": encoded(picture(40 * (name == "b") + n, (8, 8)), "png")
        for name in "ab"
        for n in range(6)
    }
    result = call(images | {f"a/empty{n}.png": b"" for n in range(6)}, options="--holdout 1/2")
    assert "that val has too" not in result.text


def test_test_images_that_are_drawn_are_told_of(call, said):
    images = {f"train/cat/{n}.png": encoded(picture(n, (8, 8)), "png") for n in range(12)}
    tested = {f"test/cat/{n}.png": images[f"train/cat/{n}.png"] for n in range(5)}
    result = call(images | tested, options="--holdout 1/2")
    said(result.text)
    train, val, test = (
        {files["png"] for files in result.images(split).values()} for split in ("train", "val", "test")
    )
    assert (len(val), len(test)) == (6, 5)
    assert not train & (val | test)


@pytest.mark.parametrize(("options", "held_out"), [("--holdout 1/2", "val"), ("", "test")])
def test_training_images_that_are_held_out_too_are_left_out_or_told_of(call, said, options, held_out):
    pairs = {
        f"train/cat/{n}{name}.png": encoded(picture(n, (8, 8)), "png") for n in range(6) for name in "ab"
    }
    others = {f"train/dog/{n}.png": encoded(picture(9 + n, (8, 8)), "png") for n in range(4)}
    given = {} if options else {"test/cat/new.png": encoded(picture(3, (8, 8)), "png")}
    given |= {f"{split}/cat/empty.png": b"" for split in (() if options else ("train", "test"))}
    result = call(pairs | others | given, options=options)
    said(result.text)
    train, measured = (
        {tuple(sorted(image.items())) for image in result.images(s).values()} for s in ("train", held_out)
    )
    assert bool(train & measured) is not bool(options), (
        "a draw of ours has no copies; given splits stay as they are"
    )
    assert result.dataset.splits[held_out].class_counts == ([6, 2] if options else [1, 0]), "it stays whole"
