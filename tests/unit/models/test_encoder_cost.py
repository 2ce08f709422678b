"""The cost of pretrained weights: their own steps, and those of the weights that these began from."""

import pytest
import torch
from helpers.encoders import encoder_file, info_of
from safetensors.torch import save_file

from mae_vit.models.encoder_file import Cost, cost_of_weights, read_info, to_metadata

# Lists, as JSON has them.
COLORS = {"mean": [0.5] * 3, "std": [0.25] * 3}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"images_seen": 90, "flops": 2e9}, Cost(90, 2e9)),
        ({"images_seen": 90, "flops": 2e9, "before": {"images_seen": 10, "flops": 1e9}}, Cost(100, 3e9)),
        ({"images_seen": 90, "flops": 2e9, "before": {"images_seen": None, "flops": None}}, Cost(None, None)),
        ({}, Cost(None, None)),
        ({"images_seen": 90, "flops": 2e9, "before": {"images_seen": 1, "flops": None}}, Cost(91, None)),
    ],
)
def test_all_that_weights_began_from_counts(tmp_path, known, expected):
    path = encoder_file(tmp_path / "encoder.safetensors", **COLORS, **known)
    assert cost_of_weights(str(path)) == cost_of_weights(str(tmp_path)) == expected
    assert read_info(path) == info_of(**COLORS, **known)


def test_the_cost_of_a_classifier_is_more_than_its_encoders(tmp_path):
    info = info_of(**COLORS, images_seen=90, flops=2e9)
    tensors = {"head.weight": torch.zeros(2, 16)}
    for part in ("classes", "segments"):
        path = tmp_path / f"{part}.safetensors"
        save_file(tensors, path, to_metadata({**info.to_dict(), part: ["a", "b"]}))
        assert read_info(path) == info
        assert cost_of_weights(str(path)) == Cost(None, None)


def test_random_weights_cost_nothing_and_those_of_others_are_unknown():
    assert cost_of_weights(None) == Cost(0, 0.0)
    assert cost_of_weights("timm:vit_tiny_patch16_224") == Cost(None, None)
