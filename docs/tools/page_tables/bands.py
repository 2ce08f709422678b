"""What the benchmarks of bands measured: bands.json, bands_loader.json."""

from __future__ import annotations

from page_tables.comparisons import spread
from page_tables.files import decimal, load, table

ARMS = "bands.json"


def arms() -> str:
    """Few-shot accuracy of MAE encoders of all bands, of three, and of 8-bit RGB."""
    rows = [
        [
            name,
            *(f"{decimal(100 * score)} %" for score in scores),
            f"{spread([100 * score for score in scores])} %",
        ]
        for name, scores in load(ARMS)["test_top1"].items()
    ]
    seeds = range(load(ARMS)["settings"]["seeds"])
    return table(
        ["what the encoder sees", *(f"seed {seed}" for seed in seeds), "mean and standard deviation"], rows
    )
