"""What `benchmarks/gpu` measured on a GPU: parity.jsonl, rates.jsonl, feed.jsonl."""

from __future__ import annotations

import json
from typing import Any

from page_tables.files import decimal, table, text

PARITY, RATES, FEED = (f"gpu/{part}.jsonl" for part in ("parity", "rates", "feed"))
_NAMES = {
    "B/16 ours": "ours",
    "B/16 ours compiled": "ours, `train.compile=true`",
    "B/16 transformers sdpa": "transformers ViTMAE, sdpa",
}
_HOW = ("fp32", "bf16", "compiled")


def figures(name: str) -> dict[str, dict[str, Any]]:
    """The lines of a part's file, by what they measure; of two the last."""
    return {line["key"]: line for line in map(json.loads, text(name).splitlines())}


def rates() -> str:
    """ViT-B/16 under MAE: speed and memory."""
    lines = figures(RATES)
    rows = [
        [
            name,
            f"{lines[key]['images_per_s']:,.0f}",
            decimal(lines[key]["ms_per_step"]),
            f"{100 * lines[key]['share_of_peak']:.0f} %",
            f"{decimal(lines[key]['peak_memory_gib'])} GiB",
        ]
        for key, name in _NAMES.items()
    ]
    return table(["ViT-B/16, MAE", "images/s", "ms a step", "of the peak rate", "memory"], rows)


def parity() -> str:
    """The largest relative difference of ten losses."""
    lines = figures(PARITY)
    objectives = [key.removesuffix(" fp32") for key in lines if key.endswith(" fp32")]
    rows = []
    for objective in objectives:
        found = [lines.get(f"{objective} {how}") for how in _HOW]
        rows.append(
            [f"`{objective}`", *(f"{line['largest_difference']:.1e}" if line else "" for line in found)]
        )
    head = ["objective", "fp32, to the CPU", "bf16, to the CPU in fp32", "fp32 compiled, to eager"]
    return table(head, rows)


def compiled() -> tuple[str, str]:
    """Images/s of the compiled step, and its share of the peak rate."""
    line = figures(RATES)["B/16 ours compiled"]
    return f"{line['images_per_s']:,.0f}", f"{100 * line['share_of_peak']:.0f}"


def matrix_rate() -> tuple[str]:
    """TFLOP/s of a large matrix product."""
    return (f"{figures(RATES)['machine']['matrix_tflop_s']:.0f}",)


def decoding() -> tuple[str]:
    """Images/s that 15 workers decode, with nothing else to do."""
    return (f"{figures(FEED)['decode, 15 workers']['images_per_s']:,.0f}",)


def fed() -> tuple[str, str]:
    """Images/s of a run from JPEGs, and the share of the time that it waits for them."""
    line = figures(FEED)["B/16 from JPEGs, compiled"]
    return f"{line['images_per_s']:,.0f}", f"{100 * line['data_wait_frac']:.0f}"
