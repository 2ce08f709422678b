"""Similarity of positions, and principal components of features."""

import numpy as np
import torch

from mae_vit.inspection.features import feature_components, position_similarity
from mae_vit.models.pos_embed import sincos_position_table


def test_similarity_by_hand():
    table = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]])  # [CLS] first: not counted
    root = 0.5**0.5
    expected = torch.tensor([[1.0, 0.0, root], [0.0, 1.0, root], [root, root, 1.0]])
    torch.testing.assert_close(position_similarity(table), expected)


def test_sincos_positions_are_most_like_their_own_row_and_column():
    maps = position_similarity(sincos_position_table((6, 8), 64))[3 * 8 + 4].reshape(6, 8)
    assert maps[3, 4] == maps.max()
    assert maps[3, 5] > maps[3, 7]
    assert maps[2, 4] > maps[0, 4]
    assert maps[3, 5] > maps[2, 5]  # straight before diagonal


def test_components_are_those_of_the_singular_value_decomposition():
    features = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0))
    components, shares = feature_components(features)
    flat = features.flatten(0, 1).double().numpy()
    left, scales, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(
        components.flatten(0, 1).abs(), abs(left[:, :3] * scales[:3]), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(shares, scales[:3] ** 2 / (scales**2).sum(), rtol=1e-5)
    assert torch.equal(components, feature_components(features)[0])
