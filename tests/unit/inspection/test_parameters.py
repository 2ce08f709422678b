"""Similarity of positions, and principal components of filters."""

import numpy as np
import torch
from sklearn.decomposition import PCA

from mae_vit.inspection.parameters import center_patch, filter_components, position_similarity
from mae_vit.models.pos_embed import sincos_position_table


def test_similarity_by_hand():
    table = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]])  # [CLS] first: not counted
    root = 0.5**0.5
    expected = torch.tensor([[1.0, 0.0, root], [0.0, 1.0, root], [root, root, 1.0]])
    torch.testing.assert_close(position_similarity(table), expected)


def test_sincos_positions_are_most_like_their_own_row_and_column():
    similarity = position_similarity(sincos_position_table((6, 8), 64))
    np.testing.assert_allclose(similarity.diagonal().numpy(), 1, atol=1e-5)
    center = center_patch((6, 8))
    assert (center // 8, center % 8) == (3, 4)
    maps = similarity[center].reshape(6, 8)
    assert maps[3, 5] > maps[3, 7]
    assert maps[2, 4] > maps[0, 4]
    assert maps[3, 5] > maps[2, 5]  # straight before diagonal


def test_components_are_those_of_scikit_learn():
    weight = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    components, shares = filter_components(weight, 5)
    expected = PCA(5, svd_solver="full").fit(weight.flatten(1).numpy())
    assert components.shape == (5, 3, 4, 4)
    np.testing.assert_allclose(shares.numpy(), expected.explained_variance_ratio_, rtol=1e-4)
    for ours, theirs in zip(components.flatten(1).numpy(), expected.components_, strict=True):
        np.testing.assert_allclose(abs(ours @ theirs), 1, atol=1e-4)


def test_fewer_filters_than_components_are_all_there_are():
    components, shares = filter_components(torch.randn(8, 1, 2, 2), 28)
    assert components.shape == (4, 1, 2, 2)
    np.testing.assert_allclose(float(shares.sum()), 1, rtol=1e-5)
