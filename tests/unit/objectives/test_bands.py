"""Images of any bands, with missing values: losses against plain loops in NumPy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.objectives import batch_of, build, model_of, options_of

from mae_vit.core.bands import Bands
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.masking import nearest_visible
from mae_vit.objectives.objective import Objective
from mae_vit.testing import build_objective

P, SIDE = 4, 16
NODATA = 7.0
# As 8 bits, in another type: the same numbers by the path of bands.
BYTES_AS_FLOATS = Bands(("r", "g", "b"), "float32", (0.0,) * 3, (255.0,) * 3)


def sixteen_bit(channels: int) -> Bands:
    names = tuple(f"B{number:02d}" for number in range(channels))
    low = tuple(100.0 * (number + 1) for number in range(channels))
    return Bands(names, "uint16", low, tuple(value + 3000.0 for value in low), NODATA)


def objective_of(name: str, bands: Bands, **changes) -> Objective:
    model = {**model_of("tiny"), "in_chans": len(bands.names), "depth": 1}
    return build_objective(options_of(name, **changes), model, bands=bands).eval()


def raw_batch(bands: Bands, images: int = 4) -> Batch:
    """Images with a missing corner, a missing band, scattered missing pixels; the last one has nothing at all."""
    draw = torch.Generator().manual_seed(1)
    raw = torch.randint(50, 4000, (images, len(bands.names), SIDE, SIDE), generator=draw)
    raw[0, :, :6, :10] = int(NODATA)
    raw[1, 0] = int(NODATA)
    raw[2][torch.rand(raw[2].shape, generator=draw) < 0.3] = int(NODATA)
    raw[3] = int(NODATA)
    index = torch.arange(20, 20 + images)
    return Batch(raw.to(torch.uint16), index % 5, SampleKeys(3, 1, index))


def normalized(batch: Batch, bands: Bands) -> tuple[np.ndarray, np.ndarray]:
    raw = batch.images.numpy().astype(np.float64)
    low, high = (np.array(ends)[:, None, None] for ends in (bands.low, bands.high))
    return ((raw - low) / (high - low) - 0.4) / 0.2, raw != NODATA


def patches_of(values: np.ndarray) -> np.ndarray:
    """(B, C, H, W) -> (B, N, P*P*C), by slicing."""
    images, _, height, width = values.shape
    cut = [
        values[:, :, row : row + P, column : column + P].transpose(0, 2, 3, 1).reshape(images, -1)
        for row in range(0, height, P)
        for column in range(0, width, P)
    ]
    return np.stack(cut, axis=1)


@pytest.mark.parametrize("name", ["mae", "mae decoding a half", "simmim", "contrastive", "contrastive_mae"])
def test_a_mask_without_missing_values_changes_no_bit(name):
    plain = build(name, "tiny")
    batch = batch_of(plain)
    floats = replace(batch, images=batch.images.float())
    torch.manual_seed(0)
    banded = build(name, "tiny", bands=BYTES_AS_FLOATS)
    assert banded.bands.valid(floats.images) is not None
    assert torch.equal(banded(floats).loss, plain(batch).loss)
    banded(floats).loss.backward()
    plain(batch).loss.backward()
    for one, other in zip(plain.parameters(), banded.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)
    with torch.no_grad():
        sums, others = plain.evaluation_sums(batch), banded.evaluation_sums(floats)
    for key, value in sums.items():
        assert torch.equal(value.float(), others[key].float())


@pytest.mark.parametrize("norm_pix", [True, False])
@torch.no_grad()
def test_mae_and_psnr_against_plain_loops(norm_pix):
    bands = sixteen_bit(5)
    mae = objective_of("mae", bands, norm_pix_loss=norm_pix)
    batch = raw_batch(bands)
    images, valid = normalized(batch, bands)
    np.testing.assert_allclose(mae.normalize(batch.images), np.where(valid, images, 0), atol=1e-5)
    np.testing.assert_allclose(
        mae.unit(batch.images), np.where(valid, bands.unit(batch.images), 0), atol=1e-6
    )
    masking = mae.draw_masking(batch.keys)
    prediction, mask = mae.predict_all(mae.normalize(batch.images), masking), masking.mask
    patches, there = patches_of(images), patches_of(valid)
    guess, masked = prediction.numpy().astype(np.float64), mask.numpy()
    losses, squared, baseline, measured = [], 0.0, 0.0, 0
    for image in range(len(patches)):
        errors = []
        for patch in np.flatnonzero(masked[image]):
            known = there[image, patch]
            values = patches[image, patch][known]
            if not len(values):
                continue
            mean, scale = 0.0, 1.0
            if norm_pix:
                mean = values.mean()
                scale = math.sqrt((values.var(ddof=1) if len(values) > 1 else 0.0) + 1e-6)
            predicted = guess[image, patch][known]
            errors += list((predicted - (values - mean) / scale) ** 2)
            squared += (((predicted * scale + mean - values) * 0.2) ** 2).sum()
            colors = (
                np.full(len(values), mean) if norm_pix else averaged(patches, there, masked, image, patch)
            )
            baseline += (((colors - values) * 0.2) ** 2).sum()
            measured += len(values)
        losses.append(np.mean(errors) if errors else 0.0)
    expected = np.mean(losses)
    assert float(mae(batch).loss) == pytest.approx(expected, rel=1e-4)
    metrics = mae.evaluation_metrics({key: float(value) for key, value in mae.evaluation_sums(batch).items()})
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["psnr_db"] == pytest.approx(-10 * math.log10(squared / measured), abs=1e-3)
    assert metrics["psnr_baseline_db"] == pytest.approx(-10 * math.log10(baseline / measured), abs=1e-3)
    assert metrics["psnr_gain_db"] == pytest.approx(metrics["psnr_db"] - metrics["psnr_baseline_db"])


def averaged(
    patches: np.ndarray, there: np.ndarray, masked: np.ndarray, image: int, patch: int
) -> np.ndarray:
    """Returns the local average of a patch's known values: of visible patches that have the band."""
    columns, channels = SIDE // P, 5
    row, column = divmod(int(patch), columns)
    colors = []
    for band in range(channels):
        total = weights = 0.0
        for other in np.flatnonzero(masked[image] == 0):
            known = there[image, other][band::channels]
            if known.any():
                weight = math.exp(-((other // columns - row) ** 2 + (other % columns - column) ** 2) / 2)
                total += weight * patches[image, other][band::channels][known].mean()
                weights += weight
        colors.append(total / weights if weights else 0.0)
    return np.tile(colors, P * P)[there[image, patch]]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mae", {"decode_ratio": 0.5}),
        ("simmim", {}),
        ("supervised", {"mixup": 0.8, "cutmix": 1.0}),
    ],
)
def test_loss_is_blind_to_missing_values_and_to_the_split(name, changes):
    bands = sixteen_bit(5)
    objective = objective_of(name, bands, **changes)
    batch = raw_batch(bands)
    loss = objective(batch).loss
    assert torch.isfinite(loss)
    # The same pixels are missing, by another mark.
    marked = replace(bands, dtype="float32", nodata=None)
    floats = torch.where(batch.images.float() == NODATA, torch.nan, batch.images.float())
    other = objective_of(name, marked, **changes)
    torch.testing.assert_close(other(replace(batch, images=floats)).loss, loss)
    halves = [
        objective(
            Batch(batch.images[part], batch.labels[part], replace(batch.keys, index=batch.keys.index[part]))
        ).loss
        for part in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(halves) / 2, loss)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in objective.parameters() if p.grad is not None)


@pytest.mark.parametrize("channels", [2, 5])
@torch.no_grad()
def test_mean_color_of_bands_against_a_plain_loop(channels):
    """Two bands are joint colors, as three; five bands are five questions of 8 classes."""
    bands = sixteen_bit(channels)
    objective = objective_of("masked_patch", bands)
    batch = raw_batch(bands)
    prediction, corruption = objective.predict(batch)
    questions, classes = (1, 64) if channels == 2 else (5, 8)
    assert prediction.shape[-1] == questions * classes
    images, valid = normalized(batch, bands)
    unit, there = patches_of(images * 0.2 + 0.4), patches_of(valid)
    nearest = nearest_visible(corruption.mask, objective.encoder.grid_size)

    def bins_of(image: int, patch: int) -> list[int | None]:
        bins: list[int | None] = []
        for band in range(channels):
            values = unit[image, patch][band::channels][there[image, patch][band::channels]]
            bins.append(min(7, max(0, math.floor(values.mean() * 8))) if len(values) else None)
        if channels == 5:
            return bins
        return [None if None in bins else 8 * bins[0] + bins[1]]

    losses, hits, copies, counted = [], 0, 0, 0
    for image, ids in enumerate(corruption.ids.tolist()):
        each = []
        for place, patch in enumerate(ids):
            logits = prediction[image, place].double().view(questions, classes).log_softmax(dim=-1)
            copied = bins_of(image, int(nearest[image, patch]))
            for question, answer in enumerate(bins_of(image, patch)):
                if answer is None:
                    continue
                each.append(-float(logits[question, answer]))
                if corruption.kind[image, place] == 0:
                    counted += 1
                    hits += int(logits[question].argmax()) == answer
                    copies += copied[question] == answer
        losses.append(np.mean(each) if each else 0.0)
    assert float(objective(batch).loss) == pytest.approx(np.mean(losses), rel=1e-4)
    metrics = objective.evaluation_metrics(
        {key: float(value) for key, value in objective.evaluation_sums(batch).items()}
    )
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["accuracy_on_mask"] == pytest.approx(hits / counted)
    assert metrics["accuracy_nearest_visible"] == pytest.approx(copies / counted)
    assert objective.pictures(batch)[1].images.shape == batch.images.shape


def test_mixtures_miss_what_either_image_misses():
    bands = sixteen_bit(2)
    objective = objective_of("supervised", bands, mixup=0.8)
    batch = raw_batch(bands)
    mixed, _ = objective.labels.targets(objective.mark_missing(batch))
    missing = batch.images.float() == NODATA
    either = (missing | missing.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)).numpy()
    np.testing.assert_array_equal(mixed.isnan().numpy(), either)
    assert (objective.normalize(mixed)[torch.from_numpy(either)] == 0).all()
