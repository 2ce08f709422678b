"""Which labels a start brings with it."""

import json

import pytest
from pydantic import ValidationError

from mae_vit.models.encoder_cost import cost_of_weights
from mae_vit.pretraining.command import main
from mae_vit.weights.read import read_weights
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


def test_a_file_cannot_say_anything():
    with pytest.raises(ValidationError):
        SeenLabels.model_validate({"fingerprint": "a", "per_class": "many"})


def pretrain_some(digits, folder, *arguments: str) -> None:
    small = ["model.embed_dim=16", "model.depth=1", "model.num_heads=2", "monitor.tensorboard=false"]
    settings = [f"data.path={digits}", f"run.dir={folder}", "train.engine=torch", "train.warmup_steps=0"]
    assert (
        main(
            [
                "--config",
                "mae_digits",
                *small,
                *settings,
                *arguments,
            ]
        )
        == 0
    )


def test_labels_are_known_through_what_a_run_began_from(digits, tmp_path):
    """Else a start that has them by way of another run would be compared as if it had none."""
    supervised = ["objective={name: supervised}", "train.steps=2", "data.leave_out_per_class=20"]
    pretrain_some(digits, tmp_path / "first", *supervised)
    known = read_weights(str(tmp_path / "first")).labels
    assert known is not None
    assert known.left_out == 20
    begun = [f"model.init={tmp_path / 'first'}"]
    pretrain_some(digits, tmp_path / "second", *begun, "train.steps=2")
    # Goes on without it.
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    pretrain_some(digits, tmp_path / "second", *begun, "train.steps=4", "--extend")
    pretrain_some(digits, tmp_path / "none", "train.steps=2")
    for name, expected in (("second", known), ("second/encoder.safetensors", known), ("none", None)):
        assert read_weights(str(tmp_path / name)).labels == expected
    # Nor is the cost of what it began from lost.
    first, own = cost_of_weights(str(tmp_path / "elsewhere")), cost_of_weights(str(tmp_path / "none"))
    whole = cost_of_weights(str(tmp_path / "second"))
    assert first.images_seen == own.images_seen == 256
    assert whole.images_seen == first.images_seen + 2 * own.images_seen
    assert whole.flops == first.flops + 2 * own.flops


def test_a_checkpoint_that_does_not_say_is_known_by_its_options(digits, tmp_path):
    pretrain_some(digits, tmp_path / "old", "objective={name: supervised}", "train.steps=2")
    path = tmp_path / "old"
    expected = read_weights(str(path)).labels
    states = sorted(path.glob("checkpoints/step-*/state.json"))
    for state in states:
        described = json.loads(state.read_text())
        assert described["identity"].pop("labels_seen")
        state.write_text(json.dumps(described))
    assert read_weights(str(path)).labels == expected == SeenLabels(fingerprint=expected.fingerprint)


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
    assert REST.joined(OTHER, TUNED) == seen
    assert SeenLabels.model_validate(json.loads(seen.model_dump_json())) == seen
