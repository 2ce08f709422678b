"""How training images may be seen."""

from types import SimpleNamespace

import pytest

from mae_vit.core.errors import InputError
from mae_vit.data.views import check_pad


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (
            (64, 64),
            "random_resized, and model.img_size=64 with a larger model.patch_size to train on more detail",
        ),
        ((300, 500), "random_resized, and model.img_size=224 "),
        ((24, 40), "random_resized$"),
    ],
)
def test_images_larger_than_the_networks_name_its_size_beside_the_crop(stored, said):
    sides = {"height": (stored[0], stored[0]), "width": (stored[1], stored[1])}
    index = SimpleNamespace(split="train", split_info=SimpleNamespace(**sides))
    with pytest.raises(InputError, match=said):
        check_pad("pad", index, (32, 32))
