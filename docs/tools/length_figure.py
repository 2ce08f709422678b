"""Draws docs/results/study_length/length.png: accuracy against the steps of pretraining by MAE, on three data sets.

python docs/tools/length_figure.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_tables.comparisons import FIVE_K, LENGTH, LENGTH_PHOTOS, MAE, MAE_15, SCRATCH, percent, rows
from page_tables.files import RESULTS

OUT = RESULTS / LENGTH / "length.png"


def main() -> None:
    """Draws fine-tuned and frozen encoders; a dashed line is the same network from scratch."""
    figure = Figure(figsize=(9.5, 3.0), layout="constrained")
    digits, cifar, photos = figure.subplots(1, 3)
    _draw(digits, LENGTH, _steps_in_names(LENGTH), "from scratch", "1,497 digits of 8 px, 40 labels each")
    # The encoder of 100 epochs is older than the column of steps: 195 steps an epoch.
    lengths = {MAE_15: 2_925, MAE: 19_500}
    _draw(cifar, FIVE_K, lengths, SCRATCH, "50,000 images of CIFAR-10, 500 labels each")
    name = "25,000 of Tiny-ImageNet, 50 labels each"
    _draw(photos, LENGTH_PHOTOS, _steps_in_names(LENGTH_PHOTOS), "from scratch", name)
    digits.set_ylabel("test accuracy, %")
    digits.legend(fontsize=8, loc="lower right")
    figure.savefig(OUT, dpi=110, metadata={"Software": None})
    print(OUT)


def _steps_in_names(comparison: str) -> dict[str, int]:
    return {name: int(re.sub(r"\D", "", name)) for name in rows(comparison) if name.startswith("MAE, ")}


def _draw(axes: Axes, comparison: str, steps: dict[str, int], scratch: str, title: str) -> None:
    for mode, name, color in (("finetune", "fine-tuned", "C0"), ("few_shot", "frozen, least squares", "C1")):
        values = [percent(comparison, entry, mode=mode) for entry in steps]
        means, spreads = list(map(mean, values)), list(map(stdev, values))
        axes.errorbar(list(steps.values()), means, spreads, marker="o", color=color, label=name)
        axes.axhline(mean(percent(comparison, scratch, mode=mode)), color=color, linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="steps of MAE", ylim=(0, 100))
    axes.set_title(title, fontsize=9)
    axes.set_xticks(list(steps.values()), [f"{each:,}" for each in steps.values()])
    axes.minorticks_off()
    axes.grid(alpha=0.2)


if __name__ == "__main__":
    main()
