"""What the report of a comparison says and shows of segmentation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mae_vit.evaluation.segmentation import IMAGES_FILE
from mae_vit.finetuning.comparison.config import TUNED_BY
from mae_vit.finetuning.comparison.report.rows import Row
from mae_vit.inspection.class_maps import draw_class_maps

SEGMENTATION_READING = """mIoU is the mean over classes of the intersection over union of all pixels of the test
images ({size:,}, split {split}), at the size that the network sees. A class that is neither there nor predicted does
not count. Each run reads the test images once. The table has the mean and standard deviation over seeds. The gap is
the difference from the reference in the same mode, seed by seed. It is in parentheses if it may be chance. Its
interval covers the choice of test images (a bootstrap of images) and of seeds. It does not cover another subset of
masks or another pretraining run. The first p is Wilcoxon's signed-rank test on each image's mean IoU, for the seed
with the weakest evidence. The second is the paired t-test over seeds."""
# Beside the report, which shows it too.
MASKS = "masks.png"
OVERLAYS_CAPTION = "Some test images, drawn before any result; the classes of each entry's first seed."


def overlays(rows: Sequence[Row]) -> bytes | None:
    """Draws some test images with their true classes, and those that each entry predicts, as a PNG.

    Whole networks are shown, other modes where there are none; None without segmentation.
    """
    segmented = [row for row in rows if row.overlaps is not None]
    shown = [row for row in segmented if row.cell.mode in TUNED_BY] or segmented
    first: dict[str, Row] = {}
    for row in shown:
        first.setdefault(row.cell.entry.name, row)
    if not first:
        return None
    arrays, classes = {}, list[str]()
    for name, row in first.items():
        with np.load(row.cell.run.folder / IMAGES_FILE) as file:
            arrays[name] = {key: file[key] for key in ("pixels", "truth", "predicted")}
            classes = file["classes"].tolist()
    base = next(iter(arrays.values()))
    same = {name: maps for name, maps in arrays.items() if np.array_equal(maps["truth"], base["truth"])}
    columns = {"true": base["truth"], **{name: maps["predicted"] for name, maps in same.items()}}
    return draw_class_maps(base["pixels"], columns, classes, base["truth"])
