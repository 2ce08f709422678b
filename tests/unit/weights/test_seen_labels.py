"""Which labels weights have seen."""

import json

import pytest

from mae_vit.weights.seen_labels import SeenLabels, SplitLabels

ALL = SeenLabels(fingerprint="a")
REST = SeenLabels(fingerprint="a", left_out=500)
TUNED = SeenLabels(fingerprint="a", per_class=500, holdout=0.1)
OTHER = SeenLabels(fingerprint="b")
CASES = [
    (ALL, ("a", None, 0.1), "held-out"),
    (ALL, ("a", 500, 0.1), "held-out"),
    (ALL, ("a", 500, 0.0), "others"),
    (ALL, ("b", 500, 0.1), "other data"),
    (REST, ("a", 500, 0.1), "others"),
    (REST, ("a", 100, 0.1), "others"),
    (REST, ("a", 501, 0.1), "held-out"),
    (REST, ("a", None, 0.1), "held-out"),
    (TUNED, ("a", 500, 0.1), "others"),
    (TUNED, ("a", 500, 0.05), "others"),
    (TUNED, ("a", 500, 0.2), "held-out"),
    (TUNED, ("a", 100, 0.1), "held-out"),
    (TUNED, ("a", None, 0.1), "held-out"),
]


@pytest.mark.parametrize(("seen", "run", "overlap"), CASES)
def test_overlap(seen, run, overlap):
    assert seen.overlap(*run) == overlap


@pytest.mark.parametrize(
    ("later", "before", "together"),
    [
        (REST, None, REST),
        (REST, ALL, ALL),
        (TUNED, ALL, ALL),
        (ALL, TUNED, ALL),
        (TUNED, TUNED, TUNED),
        (TUNED, SeenLabels(fingerprint="a", per_class=500, holdout=0.2), TUNED),
        (
            TUNED,
            SeenLabels(fingerprint="a", per_class=900, holdout=0.2),
            SeenLabels(fingerprint="a", per_class=900),
        ),
        (REST, OTHER, SeenLabels(fingerprint="a", left_out=500, elsewhere=[SplitLabels(fingerprint="b")])),
    ],
)
def test_labels_of_two_stages(later, before, together):
    assert later.joined(before) == together


def test_labels_of_three_stages_on_two_splits():
    """Else those of the first would be forgotten with the second."""
    seen = REST.joined(OTHER.joined(TUNED))
    assert seen == SeenLabels(fingerprint="a", elsewhere=[SplitLabels(fingerprint="b")])
    assert OTHER.joined(TUNED).overlap("a", 500, 0.2) == "held-out"
    assert OTHER.joined(TUNED).overlap("a", 500, 0.1) == "other data"
    assert REST.joined(OTHER).overlap("a", 500, 0.1) == "other data"
    assert SeenLabels.model_validate(json.loads(seen.model_dump_json())) == seen


def test_several_draws_left_out_cover_each_of_them():
    left_out = SeenLabels(fingerprint="data", left_out=50, draw=1, draws=2)
    assert left_out.model_dump()["draws"] == 2
    assert SeenLabels(**left_out.model_dump()) == left_out
    assert "draws" not in SeenLabels(fingerprint="data", left_out=50).model_dump()
    overlaps = [left_out.overlap("data", 50, 0.1, draw=draw) for draw in range(4)]
    assert overlaps == ["held-out", "others", "others", "held-out"]
    assert left_out.overlap("data", 51, 0.1, draw=2) == "held-out"
    # Joined with weights that left out other draws, none counts as left out: that is cautious.
    joined = left_out.joined(SeenLabels(fingerprint="data", left_out=50, draw=1))
    assert [joined.overlap("data", 50, 0.1, draw=draw) for draw in (1, 2)] == ["held-out", "held-out"]
    assert left_out.joined(left_out).overlap("data", 50, 0.1, draw=2) == "others"


def test_held_out_images_of_another_draw_are_not_held_out_here():
    tuned = SeenLabels(fingerprint="data", per_class=50, holdout=0.1, draw=1)
    assert tuned.overlap("data", 50, 0.1, draw=1) == "others"
    assert tuned.overlap("data", 50, 0.1, draw=0) == "held-out"


def test_weights_of_two_draws_have_seen_the_labels_of_both():
    both = SeenLabels(fingerprint="data", per_class=50, holdout=0.1, draw=2).joined(
        SeenLabels(fingerprint="data", per_class=50, holdout=0.1, draw=1)
    )
    assert (both.per_class, both.holdout) == (None, 0.0)
    assert both.overlap("data", 50, 0.1, draw=2) == "held-out"
