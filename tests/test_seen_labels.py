"""Which labels a start brings with it."""

import pytest
from pydantic import ValidationError

from mae_vit.seen_labels import SeenLabels

ALL = SeenLabels(fingerprint="a")
REST = SeenLabels(fingerprint="a", left_out=500)
TUNED = SeenLabels(fingerprint="a", per_class=500, holdout=0.1)
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
