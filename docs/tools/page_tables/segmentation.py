"""The comparison on the built segmentation task: results.csv, and intervals of report.md."""

from __future__ import annotations

from page_tables.comparisons import SCRATCH, above, rows, spread
from page_tables.files import decimal, table

COMPARISON = "compare_segmentation"
WHOLE, PROBE = "segment", "segment_probe"


def miou(entry: str, mode: str = WHOLE, *, column: str = "test_miou") -> list[float]:
    """Mean IoU in percent, one value for each seed; none if the entry has no such mode."""
    return [100 * float(row[column]) for row in rows(COMPARISON)[entry] if row["mode"] == mode]


def mean_miou(entry: str, mode: str = WHOLE, *, column: str = "test_miou") -> str:
    """Mean IoU in percent, over seeds."""
    values = miou(entry, mode, column=column)
    return decimal(sum(values) / len(values))


def compared() -> str:
    """Each row, fine-tuned and probed."""
    lines = []
    for entry in sorted(rows(COMPARISON), key=lambda name: sum(miou(name))):
        points, low, high = ("", "", "") if entry == SCRATCH else above(COMPARISON, entry, SCRATCH)
        gap = f"{points} ({low} to {high})" if points else ""
        probed = miou(entry, PROBE)
        lines.append([entry, spread(miou(entry)), gap, spread(probed) if probed else ""])
    head = ["512 masks", "fine-tuned, mIoU %", "points above scratch (95 % interval)", "probe, mIoU %"]
    return table(head, lines)
