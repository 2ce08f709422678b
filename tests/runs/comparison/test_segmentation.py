"""Comparisons of segmentation: paired tests by image, what the report shows, and what does not go together."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, one_line
from helpers.comparison import gap_of, row
from helpers.finetune import TINY
from helpers.images import prepare_pairs, write_pairs
from helpers.weights.foreign import write_backbone
from PIL import Image
from scipy import stats

from mae_vit.evaluation.segmentation import Overlaps, count_overlaps
from mae_vit.finetuning.comparison.command import main
from mae_vit.finetuning.comparison.report.predictions import pack_predictions, read_scores
from mae_vit.finetuning.comparison.report.significance import gap_between

K, IMAGES = 3, 60


def segmented(name: str, seed: int, right: float):
    """A row whose pixels are right with this probability, on the same truth as every other."""
    truth = np.random.default_rng(0).integers(0, K, (IMAGES, 6, 6))
    rng = np.random.default_rng([seed, int(1000 * right)])
    guess = np.where(rng.random(truth.shape) < right, truth, rng.integers(0, K, truth.shape))
    both, either = count_overlaps(torch.from_numpy(guess), torch.from_numpy(truth), K)
    overlaps = Overlaps(both.numpy(), either.numpy(), np.full(IMAGES, 36.0))
    base, nothing = row(name, seed, np.zeros(IMAGES, bool)), np.zeros(0, int)
    values = {"test_miou": overlaps.miou}
    return replace(base, values=values, truth=nothing, predicted=nothing, overlaps=overlaps)


def test_a_gap_is_that_of_the_mean_iou():
    ours, theirs = (
        [segmented(name, seed, right) for seed in range(3)] for name, right in (("a", 0.7), ("b", 0.5))
    )
    gap = gap_of(ours, theirs)
    by_run = np.array(
        [one.overlaps.miou - other.overlaps.miou for one, other in zip(ours, theirs, strict=True)]
    )
    assert gap.points == pytest.approx(100 * by_run.mean())
    assert gap.is_clear
    assert gap.seeds == 3
    expected = [
        stats.wilcoxon(one.overlaps.miou_by_image, other.overlaps.miou_by_image).pvalue
        for one, other in zip(ours, theirs, strict=True)
    ]
    assert gap.p_images == pytest.approx(max(expected))
    # The bootstrap of images against the jackknife, which is another way to the same error.
    left_out = []
    for image in range(IMAGES):
        kept = np.arange(IMAGES) != image
        left_out.append(
            np.mean(
                [
                    Overlaps(
                        a.overlaps.intersections[kept], a.overlaps.unions[kept], a.overlaps.pixels[kept]
                    ).miou
                    - Overlaps(
                        b.overlaps.intersections[kept], b.overlaps.unions[kept], b.overlaps.pixels[kept]
                    ).miou
                    for a, b in zip(ours, theirs, strict=True)
                ]
            )
        )
    jackknife = np.sqrt((IMAGES - 1) / IMAGES * np.square(np.array(left_out) - np.mean(left_out)).sum())
    from_seeds = stats.t.ppf(0.975, 2) * by_run.std(ddof=1) / np.sqrt(3)
    from_images = np.sqrt((gap.half_width / 100) ** 2 - from_seeds**2) / stats.norm.ppf(0.975)
    assert from_images == pytest.approx(jackknife, rel=0.15)


def test_gaps_are_computed_again_from_the_published_files(tmp_path):
    """`results.csv` and `predictions.npz` give the interval that the pixels of each image gave."""
    rows = [segmented(name, seed, right) for name, right in (("a", 0.7), ("b", 0.5)) for seed in range(2)]
    (tmp_path / "predictions.npz").write_bytes(pack_predictions(rows))
    lines = [f"{one.cell.entry.name},{one.cell.labels},{one.cell.mode},{one.cell.seed}" for one in rows]
    (tmp_path / "results.csv").write_text("\n".join(["entry,labels_per_class,mode,seed", *lines]))
    ours, theirs = read_scores(tmp_path).values()
    assert gap_between(ours, theirs) == gap_of(rows[:2], rows[2:])
    assert np.array_equal(ours[1].overlaps.pixels, rows[1].overlaps.pixels)


def test_equal_rows_have_no_gap():
    ours = [segmented("a", 0, 0.6)]
    gap = gap_of(ours, [segmented("b", 0, 0.6)])
    assert (gap.points, gap.p_images) == (0, 1)
    assert not gap.is_clear


CONFIG = """
run: {{name: masks}}
data: {{path: {data}}}
set:
  data.augment: {{crop: pad, pad_px: 1, flip: false}}
  train.steps: 4
  train.warmup_steps: 1
  train.effective_batch_size: 8
  monitor.log_every_steps: 1
  monitor.evaluate_every_steps: 2
  monitor.tensorboard: false
  checkpoint.every_steps: 4
entries:
  - {{name: scratch, config: finetune_cifar_tiny.yaml, set: {{{model}, finetune.pool: cls}}}}
  - {{name: SmallResNet, config: small_resnet_cifar.yaml, modes: [segment],
      set: {{model.img_size: 8, model.in_chans: 1}}}}
reference: scratch
modes: [segment, segment_probe]
seeds: [0]
tune: [{{optim.lr: 1e-3}}, {{optim.lr: 3e-3}}]
parallel: 1
"""


@pytest.fixture
def config(tmp_path):
    prepare_pairs(write_pairs(tmp_path / "in", count=20), tmp_path / "out")
    path = tmp_path / "compare.yaml"
    model = ", ".join(text.replace("=", ": ") for text in TINY)
    path.write_text(CONFIG.format(data=tmp_path / "out", model=model))
    return path


@pytest.mark.slow
def test_a_comparison_from_end_to_end(config, tmp_path, capsys):
    assert main(["--config", str(config), f"run.dir={tmp_path / 'run'}"]) == 0
    assert "% mIoU" in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "results.csv").read_text())))
    assert [(one["entry"], one["mode"]) for one in rows] == [
        ("scratch", "segment"),
        ("scratch", "segment_probe"),
        ("SmallResNet", "segment"),
    ]
    assert all(0 <= float(one["test_miou"]) <= 1 for one in rows)
    assert "test_top1" not in rows[0]
    report = (tmp_path / "run" / "report.md").read_text()
    for text in ("mIoU %", "pixels %", "Wilcoxon", "SmallResNet"):
        assert text in report
    assert "top-1" not in report
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Masks</h2>" in page
    assert "Gain by class over scratch" in page
    assert "<h2>Accuracy</h2>" not in page
    # A row for the image, the truth, and each whole network.
    assert Image.open(tmp_path / "run" / "masks.png").height > 4 * 96


@pytest.mark.slow
def test_an_encoder_of_others_is_a_marked_row_of_the_probe(config, tmp_path):
    file = write_backbone(tmp_path / "swin", "swin")
    entry = f"""  - {{name: Swin, config: {ROOT}/configs/finetune/finetune_cifar_tiny.yaml, start: "frozen:{file}",
      modes: [segment_probe], set: {{data.augment: {{crop: random_resized, flip: false}}}}}}
reference: scratch"""
    config.write_text(config.read_text().replace("reference: scratch", entry))
    assert main(["--config", str(config), f"run.dir={tmp_path / 'run'}"]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "results.csv").read_text())))
    (swin,) = [one for one in rows if one["entry"] == "Swin"]
    assert swin["mode"] == "segment_probe"
    assert swin["start_origin"] == "trained by others on other data"
    assert 0 <= float(swin["test_miou"]) <= 1
    report = (tmp_path / "run" / "report.md").read_text()
    assert "Swin (trained by others on other data)" in report


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("modes=[finetune,segment]", "give segmentation a comparison of its own"),
        ("test_subset=10", "test_subset has no effect with segmentation"),
        ("modes=[segment_probe]", None),
    ],
)
def test_what_does_not_go_together(config, tmp_path, capsys, change, said):
    assert main(["--config", str(config), "--dry-run", f"run.dir={tmp_path / 'run'}", change]) == (
        2 if said else 0
    )
    if said:
        assert said in one_line(capsys)


def test_tuning_needs_a_mode_that_is_tuned(config, capsys):
    text = (
        config.read_text()
        .replace("modes: [segment],", "modes: [segment_probe],")
        .replace("segment, segment_probe", "segment_probe")
    )
    config.write_text(text)
    assert main(["--config", str(config), "--dry-run"]) == 2
    assert "tune has no effect with modes" in one_line(capsys)
