"""Comparisons of segmentation: paired tests by image, what the report shows, and what does not go together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import one_line
from helpers.comparison import TINY_MODEL, gap_of, read_rows, read_scores, row, rows_of
from helpers.images import prepare_pairs, write_pairs
from helpers.weights.backbones import write_named
from PIL import Image
from scipy import stats

from mae_vit.comparison.command import main
from mae_vit.comparison.report.rows import pack_predictions
from mae_vit.comparison.report.significance import gap_between
from mae_vit.evaluation.segmentation import Overlaps, count_overlaps
from mae_vit.weights.names import FOREIGN_ORIGIN

K, IMAGES = 3, 60


def segmented(name: str, right: float, seeds: int) -> list:
    """Rows whose pixels are right with this probability, on the same truth as every other."""
    truth, rows = np.random.default_rng(0).integers(0, K, (IMAGES, 6, 6)), []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, int(1000 * right)])
        guess = np.where(rng.random(truth.shape) < right, truth, rng.integers(0, K, truth.shape))
        both, either = count_overlaps(torch.from_numpy(guess), torch.from_numpy(truth), K)
        overlaps = Overlaps(both.numpy(), either.numpy())
        base, nothing = row(name, seed, np.zeros(IMAGES, bool)), np.zeros(0, int)
        values = {"test_miou": overlaps.miou}
        rows.append(replace(base, values=values, truth=nothing, predicted=nothing, overlaps=overlaps))
    return rows


def test_a_gap_is_that_of_the_mean_iou():
    ours, theirs = segmented("a", 0.7, 3), segmented("b", 0.5, 3)
    gap, pairs = gap_of(ours, theirs), list(zip(ours, theirs, strict=True))
    by_run = np.array([a.overlaps.miou - b.overlaps.miou for a, b in pairs])
    assert gap.points == pytest.approx(100 * by_run.mean())
    assert (gap.is_clear, gap.seeds) == (True, 3)
    images = [[r.overlaps.miou_by_image for r in pair] for pair in pairs]
    assert gap.p_images == pytest.approx(max(stats.wilcoxon(*pair).pvalue for pair in images))

    def miou_without(row, image) -> float:
        counts, kept = row.overlaps, np.arange(IMAGES) != image
        return Overlaps(counts.intersections[kept], counts.unions[kept]).miou

    # The bootstrap of images against the jackknife, which is another way to the same error.
    left_out = np.array(
        [np.mean([miou_without(a, n) - miou_without(b, n) for a, b in pairs]) for n in range(IMAGES)]
    )
    jackknife = np.sqrt((IMAGES - 1) / IMAGES * np.square(left_out - left_out.mean()).sum())
    from_seeds = stats.t.ppf(0.975, 2) * by_run.std(ddof=1) / np.sqrt(3)
    from_images = np.sqrt((gap.half_width / 100) ** 2 - from_seeds**2) / stats.norm.ppf(0.975)
    assert from_images == pytest.approx(jackknife, rel=0.15)
    same = gap_of(segmented("a", 0.6, 1), segmented("b", 0.6, 1))
    assert (same.points, same.p_images, same.is_clear) == (0, 1, False)


@pytest.mark.parametrize(
    "rows",
    [
        [*segmented("a", 0.7, 2), *segmented("b", 0.5, 2)],
        [*rows_of("a", [0.7, 0.6]), *rows_of("b", [0.5, 0.6])],
    ],
    ids=["masks", "classes"],
)
def test_gaps_are_computed_again_from_the_published_files(tmp_path, rows):
    """`results.csv` and `predictions.npz` give the interval that each image gave."""
    (tmp_path / "predictions.npz").write_bytes(pack_predictions(rows))
    lines = [f"{r.cell.entry.name},{r.cell.labels},{r.cell.mode},{r.cell.seed}" for r in rows]
    (tmp_path / "results.csv").write_text("\n".join(["entry,labels_per_class,mode,seed", *lines]))
    ours, theirs = read_scores(tmp_path).values()
    assert gap_between(ours, theirs) == gap_of(rows[:2], rows[2:])
    if rows[1].overlaps:
        assert np.array_equal(ours[1].overlaps.pixels, rows[1].overlaps.pixels)


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
    path.write_text(CONFIG.format(data=tmp_path / "out", model=TINY_MODEL))
    return path


@pytest.mark.slow
def test_a_comparison_from_end_to_end(config, tmp_path, capsys):
    file = write_named("test_convnext", tmp_path)
    entry = f"""  - {{name: ConvNeXt, config: finetune_cifar_tiny, start: "{file}", modes: [segment_probe],
      set: {{model.img_size: 32, data.augment: {{crop: random_resized, flip: false}}}}}}
reference: scratch"""
    config.write_text(config.read_text().replace("reference: scratch", entry))
    assert main(["--config", str(config), f"run.dir={tmp_path / 'run'}"]) == 0
    assert "% mIoU" in capsys.readouterr().out
    rows = read_rows(tmp_path / "run")
    assert [(line["entry"], line["mode"], line["start_origin"]) for line in rows] == [
        ("scratch", "segment", ""),
        ("scratch", "segment_probe", ""),
        ("SmallResNet", "segment", ""),
        ("ConvNeXt", "segment_probe", FOREIGN_ORIGIN),
    ]
    assert all(0 <= float(line["test_miou"]) <= 1 for line in rows)
    assert "test_top1" not in rows[0]
    report = (tmp_path / "run" / "report.md").read_text()
    for text in ("mIoU %", "pixels %", "Wilcoxon", "SmallResNet", f"ConvNeXt ({FOREIGN_ORIGIN})"):
        assert text in report
    assert "top-1" not in report
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Masks</h2>" in page
    assert "<h2>Accuracy</h2>" not in page
    # A row for the image, the truth, and each whole network.
    assert Image.open(tmp_path / "run" / "masks.png").height > 4 * 96


@pytest.mark.parametrize(
    ("change", "code"),
    [("modes=[finetune,segment]", 2), ("modes=[segment_probe]", 0)],
)
def test_what_does_not_go_together(config, tmp_path, capsys, change, code, said):
    assert main(["--config", str(config), "--dry-run", f"run.dir={tmp_path / 'run'}", change]) == code
    if code:
        said(one_line(capsys))


def test_tuning_needs_a_mode_that_is_tuned(config, capsys, said):
    text = config.read_text().replace("modes: [segment],", "modes: [segment_probe],")
    config.write_text(text.replace("segment, segment_probe", "segment_probe"))
    assert main(["--config", str(config), "--dry-run"]) == 2
    said(one_line(capsys))
