"""An export is refused if the other library computes something else."""

import pytest
import torch

from mae_vit.core.errors import InputError
from mae_vit.weights.export.source import Written


@pytest.mark.parametrize(
    ("size", "error", "same"), [(0.1, 5e-5, True), (0.1, 2e-4, False), (300, 2e-2, True), (300, 0.1, False)]
)
def test_outputs_agree_to_a_share_of_the_largest(size, error, same):
    ours = torch.full((3, 4), float(size))
    written = Written({"features": (ours, ours + error)}, "")
    if same:
        assert written.largest_difference("timm") <= 1e-4
    else:
        with pytest.raises(InputError, match="features differ by"):
            written.largest_difference("timm")
