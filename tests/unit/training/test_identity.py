"""What a run that may not resume says of the differences."""

import pytest

from mae_vit.core.errors import InputError
from mae_vit.training.identity import Identity, check_identity

SAVED = {
    **{"data.fingerprint": "a", "data.mean": [0.1], "data.std": [0.2], "data.split": "train"},
    **{"finetune.test_fingerprint": "b", "finetune.start_digest": "d", "train.steps": 2},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"data.fingerprint": "c", "data.mean": [0.3]},
        dict.fromkeys(("data.fingerprint", "finetune.test_fingerprint"), "c") | {"train.steps": 3},
        # Another option chose them.
        {"data.fingerprint": "c", "data.mean": [0.3], "data.split": "all"},
        {"finetune.start_digest": "c"},
        # The same images, normalized otherwise.
        {"data.mean": [0.3]},
    ],
    ids=",".join,
)
def test_other_images_are_named_by_their_path(changed, said):
    now = Identity({**SAVED, **changed}, data_path="data/cats")
    with pytest.raises(InputError) as refused:
        check_identity(SAVED, now, "runs/x", otherwise="give another run.name")
    said(refused)
