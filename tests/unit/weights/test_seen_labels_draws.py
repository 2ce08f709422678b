"""Labels of several draws: weights that left out one draw's labels have seen another's."""

from mae_vit.weights.seen_labels import SeenLabels


def test_what_another_draw_left_out_was_not_left_out_here():
    left_out = SeenLabels(fingerprint="data", left_out=50, draw=1)
    assert left_out.overlap("data", 50, 0.1, draw=1) == "others"
    assert left_out.overlap("data", 50, 0.1, draw=2) == "held-out"
    assert left_out.overlap("data", 50, 0.0, draw=2) == "others", "no image chooses anything"


def test_several_draws_left_out_cover_each_of_them():
    left_out = SeenLabels(fingerprint="data", left_out=50, draw=1, draws=2)
    assert left_out.model_dump()["draws"] == 2
    assert SeenLabels(**left_out.model_dump()) == left_out
    assert "draws" not in SeenLabels(fingerprint="data", left_out=50).model_dump()
    overlaps = [left_out.overlap("data", 50, 0.1, draw=draw) for draw in range(4)]
    assert overlaps == ["held-out", "others", "others", "held-out"]
    assert left_out.overlap("data", 51, 0.1, draw=2) == "held-out", "more than was left out"
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
