"""The contrast of two views, masked or not, written out."""

import math

import numpy as np
import pytest
import torch
from helpers.objectives import batch_of, build

from mae_vit.objectives.contrast import METRICS, contrast, contrast_sums
from mae_vit.objectives.contrastive import two_corners


def unit_rows(rows: int, width: int = 6) -> torch.Tensor:
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.normalize(drawn, dim=1)


def test_contrast_and_spread_are_those_of_each_group_by_hand():
    z = unit_rows(12)
    contrasts = contrast(z, group_size=3, temperature=0.2)
    for row in range(12):
        group = range(row // 6 * 6, row // 6 * 6 + 6)
        cosines = {other: float(z[row].double() @ z[other].double()) for other in group if other != row}
        partner = row + 1 if row % 2 == 0 else row - 1
        total = sum(math.exp(cosine / 0.2) for cosine in cosines.values())
        others = [cosine for other, cosine in cosines.items() if other != partner]
        expected = {
            "contrast_loss": -math.log(math.exp(cosines[partner] / 0.2) / total),
            "retrieval_top1": float(max(cosines, key=cosines.__getitem__) == partner),
            "positive_cosine": cosines[partner],
            "negative_cosine": sum(others) / 4,
        }
        assert {name: values[row].item() for name, values in contrasts.items()} == pytest.approx(
            expected, abs=1e-5
        )
    sums = contrast_sums(contrasts, z, group_size=3)
    assert set(sums) == {*METRICS, "views"}
    assert sums["views"] == 12
    spread = torch.stack([rows.double().std(dim=0) for rows in (z[:6], z[6:])]).mean() * math.sqrt(6)
    assert sums["z_std"].item() / 12 == pytest.approx(spread.item(), rel=1e-5)
    same = unit_rows(1).expand(6, -1)
    collapsed = contrast_sums(contrast(same, group_size=3, temperature=0.2), same, group_size=3)
    assert collapsed["z_std"].item() == pytest.approx(0, abs=1e-6)
    equal = contrast(unit_rows(4).repeat_interleave(2, dim=0), group_size=4, temperature=0.1)
    assert equal["retrieval_top1"].all()
    assert not contrast(unit_rows(8), group_size=4, temperature=0.1)["retrieval_top1"].all()


def test_the_loss_is_maes_and_the_weighted_contrast():
    plain, half = (build("contrastive_mae", "tiny", contrast_weight=weight) for weight in (0.0, 0.5))
    batch = batch_of(plain)
    reconstruction, encoded = plain.encode_and_reconstruct(batch)
    assert plain(batch).loss.item() == reconstruction.item()
    mae = build("mae", "tiny", mask_ratio=0.5, decode_ratio=0.5)
    mae.load_state_dict(
        {name: value for name, value in plain.state_dict().items() if "projection" not in name}
    )
    assert mae(batch).loss.item() == reconstruction.item()
    expected = contrast(plain.project(encoded), 2, 0.2)["contrast_loss"].mean()
    assert half(batch).loss.item() == pytest.approx((reconstruction + 0.5 * expected).item(), rel=1e-6)
    values = half(batch).values
    assert values["contrast_loss"][0].item() / 8 == pytest.approx(expected.item(), rel=1e-6)
    assert values["reconstruction_loss"][0].item() / 8 == pytest.approx(reconstruction.item(), rel=1e-6)


def test_the_contrast_reaches_the_encoder_by_patches_alone():
    objective = build("contrastive_mae", "tiny")
    _, encoded = objective.encode_and_reconstruct(batch_of(objective))
    encoded.retain_grad()
    contrast(objective.project(encoded), 2, 0.2)["contrast_loss"].sum().backward()
    assert encoded.grad[:, 0].abs().max() == 0
    assert encoded.grad[:, 1:].abs().min() > 0


@pytest.mark.parametrize("encoder", ["tiny", "convolutions"])
def test_the_contrast_alone_is_infonce_of_mean_features_by_hand(encoder):
    objective = build("contrastive", encoder, group_size=4, temperature=0.5)
    batch = batch_of(objective)
    with torch.no_grad():
        tokens = objective.encoder.forward_features(objective.normalize(batch.images))
    mean = tokens[:, objective.encoder.num_prefix_tokens :].double().numpy().mean(axis=1)
    first, norm, _, last = (
        {name: value.detach().double().numpy() for name, value in layer.named_parameters()}
        for layer in objective.projection
    )
    hidden = mean @ first["weight"].T + first["bias"]
    centered = hidden - hidden.mean(axis=1, keepdims=True)
    scale = np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5)
    hidden = centered / scale * norm["weight"] + norm["bias"]
    hidden = hidden / 2 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    z = hidden @ last["weight"].T + last["bias"]
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    losses = []
    for row, partner in enumerate([1, 0, 3, 2, 5, 4, 7, 6]):
        others = [z[row] @ z[other] / 0.5 for other in range(8) if other != row]
        losses.append(np.log(np.exp(others).sum()) - z[row] @ z[partner] / 0.5)
    assert objective(batch).loss.item() == pytest.approx(np.mean(losses), rel=1e-6)


def test_held_out_views_are_two_corners_side_by_side():
    rows = torch.arange(8.0).view(8, 1).expand(8, 8)
    views = two_corners(torch.stack([rows, rows.T])[:, None])
    assert views.shape == (4, 1, 8, 8)
    # Six of eight rows, enlarged: their centers are rows 2.5 and 4.5 of the image.
    assert views[:2].mean(dim=(1, 2, 3)).tolist() == pytest.approx([2.5, 4.5])
    assert torch.equal(views[2:], views[:2].transpose(2, 3))
    assert views[0, 0, ::7, 0].tolist() == [0, 5]


def test_pictures_show_the_view_that_is_found(monkeypatch):
    objective = build("contrastive", "tiny")
    batch = batch_of(objective, 0, 3)
    z = torch.eye(4)[[0, 1, 1, 2, 2, 0]]  # the first finds the last one's, and so on
    monkeypatch.setattr(objective, "project", lambda views: z)
    found = objective.pictures(batch)[1].images
    corners = two_corners(objective.unit(batch.images))[1::2]
    torch.testing.assert_close(found, corners[[2, 0, 1]])


@pytest.mark.parametrize("name", ["contrastive", "contrastive_mae"])
def test_retrieval_counts_whole_groups_and_is_left_out_without_one(name):
    objective = build(name, "tiny").eval()
    with torch.no_grad():
        sums = objective.evaluation_sums(batch_of(objective, 0, 5))
        none = objective.evaluation_sums(batch_of(objective, 0, 1))
    assert sums["views"] == 8  # two of each of four of the five images
    metrics = objective.evaluation_metrics({name: float(value) for name, value in sums.items()})
    assert 0 <= metrics["retrieval_top1"] <= 1
    assert -1 <= metrics["negative_cosine"] < metrics["positive_cosine"] <= 1
    assert min(metrics["contrast_loss"], metrics["z_std"]) > 0
    metrics = objective.evaluation_metrics({name: float(value) for name, value in none.items()})
    assert not {*METRICS, "views"} & {*metrics}
    assert all(math.isfinite(value) for value in metrics.values())
    assert ("loss" in metrics) == (name == "contrastive_mae")
