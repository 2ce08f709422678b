"""How training images may be seen."""

from types import SimpleNamespace

import pytest

from mae_vit.core.errors import InputError
from mae_vit.data.views import check_pad


@pytest.mark.parametrize(("height", "width"), [((64, 64), (64, 64)), ((32, 32), (32, 40))])
def test_a_shift_is_of_images_of_the_networks_size(height, width):
    index = SimpleNamespace(split="train", split_info=SimpleNamespace(height=height, width=width))
    with pytest.raises(InputError, match="random_resized"):
        check_pad("pad", index, (32, 32))
    check_pad("none", index, (32, 32))
