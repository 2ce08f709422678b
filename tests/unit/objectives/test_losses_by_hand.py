"""The losses of the further objectives, written out."""

import json
import math

import pytest
import torch
from helpers.encoders import info_of
from helpers.objectives import batch_of, build, mean_color_classes

from mae_vit.core.errors import InputError
from mae_vit.models.patches import patchify
from mae_vit.objectives import OBJECTIVES
from mae_vit.testing import build_objective


def test_color_loss_is_the_mean_over_positions():
    objective = build("masked_patch", "tiny")
    batch = batch_of(objective)
    prediction, drawn = objective.predict(batch)
    assert prediction.shape == (8, 8, 512)
    colors = mean_color_classes(batch.images, 4).flatten(1)
    total = 0.0
    for sample in range(8):
        for place, patch in enumerate(drawn.ids[sample].tolist()):
            scores = prediction[sample, place].double()
            total += (scores.logsumexp(0) - scores[colors[sample, patch]]).item()
    assert objective(batch).loss.item() == pytest.approx(total / (8 * 8), rel=1e-5)


def test_simmim_loss_is_the_absolute_error_of_masked_patches_and_hides_them():
    objective = build("simmim", "tiny")
    batch = batch_of(objective)
    mask = objective.draw_mask(batch)
    images = objective.normalize(batch.images)
    prediction = objective.reconstruct(images, mask)
    errors = (prediction - patchify(images, 4)).abs().mean(-1)[mask == 1]
    assert objective(batch).loss.item() == pytest.approx(errors.mean().item(), rel=1e-5)
    masked = mask.reshape(8, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(objective.reconstruct(images + 5 * masked, mask), prediction)
    # Squares of 2 x 2 patches, three of four (60 % of 4 units, rounded up) in each image.
    units = mask.reshape(8, 2, 2, 2, 2).transpose(2, 3).flatten(3)
    assert torch.equal(units.amin(-1), units.amax(-1))
    assert (mask.sum(1) == 12).all()


@pytest.mark.parametrize(
    ("name", "img_size", "patch_size"),
    [
        *[("timm:resnet18", 80, 8), ("timm:resnet18", [96, 144], 16), ("SmallResNet", 30, 5)],
        *[("timm:vit_tiny_patch16_224", 40, 8), ("timm:vit_small_patch14_dinov2", 48, 8)],
    ],
)
def test_simmim_needs_cells_that_match_the_image(name, img_size, patch_size, said):
    model = {"name": name, "img_size": img_size, "patch_size": patch_size}
    with pytest.raises(InputError) as error:
        build_objective({"name": "simmim", "mask_unit": 1}, model)
    said(error)
    nearest = json.loads(str(error.value).partition("model.img_size=")[2].rstrip(")"))
    objective = build_objective({"name": "simmim", "mask_unit": 1}, {**model, "img_size": nearest})
    assert torch.isfinite(objective(batch_of(objective)).loss)


def test_supervised_loss_is_cross_entropy_with_smoothing():
    objective = build("supervised", "tiny", label_smoothing=0.1)
    batch = batch_of(objective)
    logs = objective.classify(batch).double().log_softmax(-1)
    target = torch.full((8, 5), 0.1 / 5, dtype=torch.float64)
    target[torch.arange(8), batch.labels] += 0.9
    output = objective(batch)
    assert output.loss.item() == pytest.approx(-(target * logs).sum(-1).mean().item(), rel=1e-5)
    hits, count = output.values["accuracy"]
    assert (hits, count) == ((logs.argmax(-1) == batch.labels).sum(), 8)


def test_supervised_is_measured_on_images_with_a_label_alone():
    objective = build("supervised", "tiny")
    whole, some = batch_of(objective), batch_of(objective, 0, 5)
    whole.labels[5:] = -1
    expected, metrics = (
        objective.evaluation_metrics({k: v.item() for k, v in objective.evaluation_sums(batch).items()})
        for batch in (some, whole)
    )
    assert math.isfinite(metrics["loss"])
    assert metrics == pytest.approx(expected, rel=1e-5)
    objective.pictures(whole)
    whole.labels[:] = -1
    assert objective.evaluation_metrics(objective.evaluation_sums(whole)) == {}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *[("supervised", {name: value}) for name, value in (("head", "linear"), ("pool", "mean"))],
        ("supervised", {"label_smoothing": 0.1}),
        *[("mae", {name: 0.5}) for name in ("mask_ratio", "decode_ratio")],
        *[("mae", {f"decoder_{name}": value}) for name, value in (("depth", 2), ("embed_dim", 64))],
        *[("mae", {name: value}) for name, value in (("decoder_num_heads", 4), ("norm_pix_loss", False))],
        ("masked_patch", {"corrupt_ratio": 0.25}),
    ],
)
def test_every_option_has_an_effect(name, changes):
    first, second = build(name, "tiny"), build(name, "tiny", **changes)
    assert first(batch_of(first)).loss != second(batch_of(second)).loss


def test_joint_is_the_weighted_sum():
    weights = {"mae": 2.0, "masked_patch": 0.5}
    objective = build("joint", "tiny", weights=weights)
    batch = batch_of(objective)
    parts = [objective.mae(batch).loss.item(), objective.masked_patch(batch).loss.item()]
    assert objective(batch).loss.item() == pytest.approx(2 * parts[0] + 0.5 * parts[1], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "geometry"),
    [
        ("simmim", {"mask_unit": 3}, {}),
        ("simmim", {"mask_unit": 2}, {"img_size": (8, 8)}),
        ("simmim", {"mask_unit": 1}, {"img_size": (4, 4)}),
        ("supervised", {}, {"num_classes": 0}),
        ("joint", {"mae": {"mask_ratio": 0.99}}, {}),
        ("mae", {"decode_ratio": 0.04}, {}),
        ("mae", {"mask_unit": 4}, {"img_size": (56, 56)}),
        ("mae", {"mask_unit": 4}, {}),
    ],
)
def test_what_does_not_fit_is_refused(name, options, geometry, said):
    section = OBJECTIVES[name].model_validate({"name": name, **options})
    num_classes = geometry.pop("num_classes", 5)
    with pytest.raises(ValueError, match="=") as error:
        section.check(info_of(**geometry).geometry, num_classes)
    said(error)
    OBJECTIVES["mae"].model_validate({"name": "mae"}).check(info_of().geometry, 0)


@pytest.mark.parametrize("side", [2, 3, 4, 10, 100])
def test_the_mask_ratio_that_a_message_asks_for_is_taken(side):
    geometry = info_of(img_size=(4 * side, 4)).geometry
    with pytest.raises(ValueError, match="none of") as error:
        OBJECTIVES["mae"].model_validate({"name": "mae", "mask_ratio": 0.9999}).check(geometry, 0)
    ratio = float(str(error.value).partition("give at most ")[2])
    OBJECTIVES["mae"].model_validate({"name": "mae", "mask_ratio": ratio}).check(geometry, 0)
