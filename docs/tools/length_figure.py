"""Draws docs/results/study_length/length.png: accuracy against the steps of pretraining, of configs/study_length.yaml.

python docs/tools/length_figure.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_tables.comparisons import LENGTH, percent, rows
from page_tables.files import RESULTS

OUT = RESULTS / LENGTH / "length.png"


def main() -> None:
    """Draws fine-tuned and frozen encoders; a dashed line is the same network from scratch."""
    scratch, *pretrained = rows(LENGTH)
    steps = [int(re.sub(r"\D", "", entry)) for entry in pretrained]
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for mode, name, color in (("finetune", "fine-tuned", "C0"), ("few_shot", "frozen, least squares", "C1")):
        values = [percent(LENGTH, entry, mode=mode) for entry in pretrained]
        axes.errorbar(
            steps, list(map(mean, values)), list(map(stdev, values)), marker="o", color=color, label=name
        )
        axes.axhline(mean(percent(LENGTH, scratch, mode=mode)), color=color, linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="steps of MAE, 128 digits each", ylabel="test accuracy, %", ylim=(0, 100))
    axes.set_xticks(steps, [f"{each:,}" for each in steps])
    axes.minorticks_off()
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(OUT, dpi=110, metadata={"Software": None})
    print(OUT)


if __name__ == "__main__":
    main()
