"""Draws docs/results/compare_cifar10_5k/compute.png: test accuracy against compute, with 5,000 labels of CIFAR-10.

python docs/tools/compute_figure.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_tables.comparisons import (
    CNN,
    CNN_LONGER,
    CONTRAST,
    EPOCHS_500,
    FIVE_K,
    LABELS,
    LONGER,
    MAE,
    MAE_15,
    MEAN_COLOR,
    RESNET,
    RESNET_LONGER,
    SCRATCH,
    SCRATCH_500,
    SCRATCH_LONGER,
    SMALL_BIT,
    percent,
    whole_pflop,
)
from page_tables.files import RESULTS

OUT = RESULTS / FIVE_K / "compute.png"
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Line(NamedTuple):
    """Rows of one kind, from little compute to much.

    Attributes:
        points: comparison, entry, and epochs: of pretraining if there is one.
    """

    name: str
    color: str
    marker: str
    points: tuple[tuple[str, str, str], ...]


LINES = (
    # Both begin with 30 epochs, at nearly the same place.
    Line("SmallResNet", "C3", "s", ((FIVE_K, RESNET, ""), (LONGER, RESNET_LONGER, "314"))),
    Line("SimpleCNN", "C1", "s", ((FIVE_K, CNN, "30 epochs"), (LONGER, CNN_LONGER, "287"))),
    Line("SmallBiT", "C5", "s", ((LONGER, SMALL_BIT, "30"),)),
    Line("ViT, MAE with a contrast", "C4", "o", ((FIVE_K, CONTRAST, "100 + 40"),)),
    Line("ViT, MAE", "C0", "o", ((FIVE_K, MAE_15, "15"), (FIVE_K, MAE, "100"))),
    Line("ViT, labels of other images", "C2", "o", ((FIVE_K, LABELS, "20"),)),
    Line("ViT, mean color", "C9", "o", ((FIVE_K, MEAN_COLOR, "40"),)),
    Line(
        "ViT from scratch",
        "C7",
        "o",
        (
            (FIVE_K, SCRATCH, "30"),
            (FIVE_K, SCRATCH_LONGER, "100"),
            (SCRATCH_500, EPOCHS_500, "500"),
        ),
    ),
)


def main() -> None:
    """Draws every row with its epochs. A line joins rows that differ only in them; a hollow one has one seed."""
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for line in LINES:
        _draw(axes, line)
    axes.set(xscale="log", xlabel="compute of pretraining and fine-tuning, PFLOP", ylabel="test accuracy, %")
    axes.set_xlim(0.017, 2.8)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.grid(alpha=0.2)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(OUT, dpi=110, metadata={"Software": None})
    print(OUT)


def _draw(axes: Axes, line: Line) -> None:
    compute = [whole_pflop(comparison, entry) for comparison, entry, _ in line.points]
    scores = [percent(comparison, entry) for comparison, entry, _ in line.points]
    means = [mean(each) for each in scores]
    spreads = [stdev(each) if len(each) > 1 else 0.0 for each in scores]
    axes.errorbar(compute, means, spreads, color=line.color, marker=line.marker, label=line.name, capsize=2)
    for place, value, each, (_, _, epochs) in zip(compute, means, scores, line.points, strict=True):
        if len(each) == 1:
            axes.plot(place, value, color=line.color, marker=line.marker, markerfacecolor="white", zorder=3)
        axes.annotate(
            epochs, (place, value), (6, -11), textcoords="offset points", fontsize=8, color=line.color
        )


if __name__ == "__main__":
    main()
