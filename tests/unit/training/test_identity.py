"""What a run that may not resume says of the differences."""

import pytest

from mae_vit.core.errors import InputError
from mae_vit.training.identity import Identity, check_identity

SAVED = {"data.fingerprint": "a", "data.mean": [0.1], "data.std": [0.2], "finetune.test_fingerprint": "b"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"data.fingerprint": "c", "data.mean": [0.3]},
            "data.path: data/cats has other training images than before",
        ),
        (
            dict.fromkeys(("data.fingerprint", "finetune.test_fingerprint"), "c") | {"train.steps": 3},
            "data.path: data/cats has other training and test images than before; train.steps was unset, now 3",
        ),
        # Another option chose them.
        (
            {"data.fingerprint": "c", "data.mean": [0.3], "data.split": "all"},
            "data.split was unset, now 'all'",
        ),
        ({"finetune.start_digest": "c"}, "--ckpt (the digest of its weights) was unset, now 'c'"),
        # The same images, normalized otherwise.
        ({"data.mean": [0.3]}, "data.mean was [0.1], now [0.3]"),
    ],
)
def test_other_images_are_named_by_their_path(changed, expected):
    now = Identity({**SAVED, **changed}, frozenset(), data_path="data/cats")
    with pytest.raises(InputError) as refused:
        check_identity(SAVED, now, "runs/x", otherwise="give another run.name")
    assert f": {expected}. Undo" in str(refused.value)
