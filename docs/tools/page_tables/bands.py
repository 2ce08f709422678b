"""What the benchmarks of bands measured: bands.json, bands_loader.json."""

from __future__ import annotations

from page_tables.comparisons import spread
from page_tables.files import decimal, load, table

ARMS = "bands.json"
LOADER = "bands_loader.json"
OURS = {"ours": "ours, as `uint16`", "ours_unit": "ours, normalized on the same core"}
PEER = "tifffile"


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


def loader() -> str:
    """Tiles a second on one core, and how many times those of tifffile."""
    results = load(LOADER)["results"]
    rows = []
    for name, words in OURS.items():
        row = [words]
        for size in results.values():
            times = size["times_of_peer"][f"{name} / {PEER}"]
            low, high = (decimal(end) for end in times["range"])
            row += [
                f"{size['tiles_per_core_s'][name]['median']:.0f}",
                f"{decimal(times['median'])} ({low} to {high})",
            ]
        rows.append(row)
    peer = [f"{PEER}, normalized"]
    for size in results.values():
        peer += [f"{size['tiles_per_core_s'][PEER]['median']:.0f}", "1"]
    head = ["", *(cell for size in results for cell in (f"tiles/s, {size}", f"times {PEER}, {size}"))]
    return table(head, [*rows, peer])
