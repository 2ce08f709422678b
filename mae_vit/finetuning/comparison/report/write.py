"""Writes the results of a comparison into its folder: table, predictions, report."""

from __future__ import annotations

from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.report.page import Report
from mae_vit.finetuning.comparison.report.predictions import PREDICTIONS, pack_predictions
from mae_vit.finetuning.comparison.report.rows import read_rows, table
from mae_vit.finetuning.comparison.report.segmentation import MASKS, overlays


def write_report(plan: ComparisonPlan) -> None:
    """Writes table, predictions and both forms of the report from the cells that are done, and says what came out.

    Raises:
        OSError: if a file cannot be read or written.
    """
    rows, folder = read_rows(plan), plan.folder
    done = {row.cell.run for row in rows}
    report = Report(plan, rows, [cell.run.name for cell in plan.cells if cell.run not in done])
    masks = overlays(rows)
    files = {
        "results.csv": table(rows).encode(),
        PREDICTIONS: pack_predictions(rows),
        "report.md": report.to_markdown().encode("utf-8", "replace"),
        "report.html": report.to_html(masks).encode("utf-8", "replace"),
        **({MASKS: masks} if masks else {}),
    }
    for name, content in files.items():
        write_atomically(folder / name, content)
    print("", report.answer, *report.notes, "", sep="\n")
    print(f"{len(rows)} of {count_of(len(plan.cells), 'cell')} done")
    print(f"  report    {folder / 'report.html'} (open in a browser), {folder / 'report.md'}")
    print(f"  table     {folder / 'results.csv'}, predictions of every cell: {folder / PREDICTIONS}")
