"""Writes `report.html`, a self-contained page, and `report.md`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from mae_vit.comparison.config import TUNED_BY, CompareConfig, Overrides, override_words
from mae_vit.comparison.plan import ComparisonPlan, data_folder
from mae_vit.comparison.protocol import describe_changes
from mae_vit.comparison.report import charts
from mae_vit.comparison.report.rows import (
    PREDICTIONS,
    Row,
    describe_labels,
    pack_predictions,
    read_rows,
    row_title,
    table,
)
from mae_vit.comparison.report.summary import (
    Line,
    answer,
    at_most_labels,
    collect_notes,
    table_lines,
)
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, format_decimal, format_duration
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.evaluation.segmentation import IMAGES_FILE
from mae_vit.inspection.class_maps import draw_class_maps
from mae_vit.pages import image, render

_READING = """Accuracy is top-1 accuracy on the test images ({size:,}, split {split}). Each run reads them once,
{chosen}. The table has the mean and standard deviation over seeds. The gap is the difference from the reference,
paired by seed and image. It is in parentheses if it may be chance. Its interval covers the choice of test images and
of seeds. {covered} another pretraining run. The first p is McNemar's exact test on the test images, for the seed with
the weakest evidence. The second is the paired t-test over seeds."""
_READING_OF_MASKS = """mIoU is the mean over classes of the intersection over union of all pixels of the test
images ({size:,}, split {split}), at the size that the network sees. A class that is neither there nor predicted does
not count. Each run reads the test images once. The table has the mean and standard deviation over seeds. The gap is
the difference from the reference in the same mode, seed by seed. It is in parentheses if it may be chance. Its
interval covers the choice of test images (a bootstrap of images) and of seeds. It does not cover another subset of
masks or another pretraining run. The first p is Wilcoxon's signed-rank test on each image's mean IoU, for the seed
with the weakest evidence. The second is the paired t-test over seeds."""
_BEST = "after validation images have chosen the epoch"
_LAST = "without validation images to choose an epoch"
_TUNED = "Settings were chosen only on validation images, each row's from the same number."
_ONE_SEED = "* With one seed, the interval covers only the choice of test images, and there is no second p."
_MONITORED = """Pretraining reports its progress on the data's val split or, without one, on test images. This does not
affect any choice."""
_PAIRS = """Each cell is the test result of the row minus that of the column, in points, with its 95 % interval, for
the largest number of labels. Cells in parentheses may be chance. The intervals are not widened for the number of
comparisons."""
_WHOLE = "Each entry counts all of its pretraining, although entries may share the run."
_OVERLAYS = "Some test images, drawn before any result; the classes of each entry's first seed."
_CHANCE = "Chance is always naming their most frequent class."


class Table(NamedTuple):
    """A table of texts, or of a column of names and columns of `numbers`."""

    head: list[str]
    body: list[list[str]]
    numbers: bool = True


class Section(NamedTuple):
    """A part of the page below its main table; what few readers need is folded."""

    title: str
    figure: tuple[Markup, str] | None = None
    table: Table | None = None
    reading: str = ""
    folded: bool = False


class Report:
    """The text, tables and charts of a comparison's report, for both of its forms."""

    def __init__(self, plan: ComparisonPlan, rows: Sequence[Row], missing: Sequence[str]) -> None:
        """Builds the parts that both forms share from finished cells and the names of `missing` runs."""
        self._plan, self._config = plan, plan.config
        self._lines = lines = table_lines(plan.config, rows)
        self._missing = "; ".join(missing)
        self._table, self._settings = _table(plan.config, lines), settings_table(plan)
        self._pairs = _pairs(at_most_labels(plan.config, lines))
        self.answer, self.notes = answer(plan.config, lines), collect_notes(lines)
        self._reading = reading(plan.config, lines)
        self._provisos = [*_left_out(plan), *describe_changes(plan)]

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        parts = [f"# {self._config.run.name}", self.answer, _markdown(self._table), *self.notes]
        parts += filter(None, [self._reading])
        parts += [_markdown(self._pairs), _PAIRS] if self._pairs else []
        parts += self._provisos
        parts += [f"Not finished: {self._missing}."] if self._missing else []
        parts += ["## Settings", _markdown(self._settings)]
        return "\n\n".join(parts) + "\n"

    def to_html(self, masks: bytes | None = None) -> str:
        """Returns `report.html`; `masks` is a PNG of test images and their predicted classes."""
        return render(
            "comparison.html",
            title=self._config.run.name,
            answer=self.answer,
            first_chart=first_chart(self._config, self._lines),
            missing=self._missing,
            measured="Mean IoU" if self._config.segments else "Accuracy",
            table=self._table,
            marked=[n for n, line in enumerate(self._lines) if line.entry == self._config.reference],
            notes=[*self.notes, *self._provisos],
            reading=self._reading,
            sections=list(self._sections(masks)),
        )

    def _sections(self, masks: bytes | None) -> Iterator[Section]:
        if self._pairs:
            yield Section("Each against each", table=self._pairs, reading=_PAIRS)
        for labels in dict.fromkeys(line.labels for line in self._lines):
            if drawn := charts.curves(self._lines, labels):
                caption = "Validation images; mean and range over seeds."
                yield Section(f"Learning curves, {describe_labels(labels)}", (drawn, caption))
        if costs := _costs(self._lines):
            drawn = charts.against_compute(self._lines)
            title = "Against compute" if self._config.segments else "Accuracy against compute"
            yield Section(title, (drawn, _WHOLE) if drawn else None, costs)
        if masks:
            yield Section("Masks", (image(masks, "masks"), _OVERLAYS))
        for name, run in self._plan.pretraining.items():
            if pictures := sorted((run.run_folder / "pictures").glob("step-*.png")):
                caption = "Held-out images; the original is the last row."
                yield Section(f"Pretraining: {name}", (image(pictures[-1].read_bytes(), name), caption))
        yield Section("Settings", table=self._settings, folded=True)


def first_chart(config: CompareConfig, lines: Sequence[Line]) -> tuple[Markup, str] | None:
    """Draws accuracy against labels, or bars of the entries if there is one number of labels.

    Returns:
        The chart and its caption; None without results.
    """
    chance = "" if config.segments else f" {_CHANCE}"
    if drawn := charts.against_labels(lines):
        return drawn, f"Test images: mean over seeds, and the range between them.{chance}"
    scored = [line for line in at_most_labels(config, lines) if line.score is not None]
    what = "Mean IoU" if config.segments else "Accuracy"
    drawn = charts.bars(scored)
    return (drawn, f"{what} on test images: mean over seeds, a dot for each.{chance}") if drawn else None


def write_report(plan: ComparisonPlan) -> None:
    """Writes table, predictions and both forms of the report from the finished cells, and prints the answer.

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
        **({"masks.png": masks} if masks else {}),
    }
    for name, content in files.items():
        write_atomically(folder / name, content)
    print("", report.answer, *report.notes, "", sep="\n")
    print(f"{len(rows)} of {count_of(len(plan.cells), 'result')} done")
    print(f"  report    {folder / 'report.html'} (open in a browser), {folder / 'report.md'}")
    print(f"  table     {folder / 'results.csv'}, predictions of every cell: {folder / PREDICTIONS}")
    # None is chosen by test images.
    if tuned := [row for row in rows if row.cell.mode == "finetune" and row.values["val_top1"] is not None]:
        best = max(tuned, key=lambda row: row.values["val_top1"])
        print(
            f"  next      mae-vit predict {shlex.quote(str(best.cell.run.folder))} IMAGES (best on validation)"
        )


def reading(config: CompareConfig, lines: Sequence[Line]) -> str:
    """Explains the numbers of a report; empty without any."""
    if not lines:
        return ""
    values = lines[0].rows[0].values
    covered = "It does not cover another draw of labels or"
    if config.label_draws:
        drawn = "validation images" if config.labels_per_class == ["all"] else "draw of labels"
        covered = f"Each seed has its own {drawn}. It does not cover"
    chosen = _BEST if any(row.values["val_size"] for line in lines for row in line.rows) else _LAST
    facts = {"size": values["test_size"], "split": values["test_split"], "covered": covered, "chosen": chosen}
    notes = [(_READING_OF_MASKS if config.segments else _READING).format(**facts)]
    notes += [_TUNED] if any(len(config.tuning_settings(entry)) > 1 for entry in config.entries) else []
    notes += [_ONE_SEED] if any(line.gap and line.gap.seeds == 1 for line in lines) else []
    notes += [_MONITORED] if config.pretrain else []
    return " ".join(" ".join(notes).split())


def settings_table(plan: ComparisonPlan) -> Table:
    """Returns what all rows share, and a line for each setting that was tried, with its score on validation images."""
    body = [["all", "", _words(plan.config.set) or "as their configs have it", "", ""]]
    for entry, labels, mode in plan.rows():
        own = _words(plan.distinguishing_settings(entry, mode, {}))
        choice = plan.choice(entry, labels, mode)
        if mode not in TUNED_BY or entry.compute_of is not None:
            taken = _words((choice.best() if choice else None) or {})
            more = f"as much compute as {entry.compute_of}" if entry.compute_of else ""
            settings = ", ".join(filter(None, (own, taken, more)))
            body.append([row_title(entry), f"{labels}, {mode}", settings, "", ""])
            continue
        scores, best = (choice.scores(), choice.best()) if choice else ([], None)
        for point, score in zip_longest(choice.settings if choice else [{}], scores):
            shown = format_decimal(100 * score) if score is not None else "not finished" if scores else ""
            chosen = "chosen" if scores and point == best else ""
            settings = ", ".join(filter(None, (own, _words(point))))
            body.append([entry.name, str(labels), settings, shown, chosen])
    return Table(["entry", "labels / class", "settings", "validation %", ""], body, numbers=False)


def overlays(rows: Sequence[Row]) -> bytes | None:
    """Draws some test images with their true classes and each entry's predictions, as a PNG; None without masks.

    It shows modes that train the whole network, or other modes if there are none.
    """
    segmented = [row for row in rows if row.overlaps is not None]
    first: dict[str, Row] = {}
    for row in [row for row in segmented if row.cell.mode in TUNED_BY] or segmented:
        first.setdefault(row.cell.entry.name, row)
    if not first:
        return None
    columns, pixels, classes = dict[str, np.ndarray](), np.zeros(0), list[str]()
    for name, row in first.items():
        with np.load(row.cell.run.folder / IMAGES_FILE) as file:
            if not columns:
                columns, pixels, classes = {"true": file["truth"]}, file["pixels"], file["classes"].tolist()
            if np.array_equal(file["truth"], columns["true"]):
                columns[name] = file["predicted"]
    return draw_class_maps(pixels, columns, classes, columns["true"])


def _table(config: CompareConfig, lines: Sequence[Line]) -> Table:
    """Omits empty columns, and labels and mode if all rows agree."""
    columns: dict[str, list[str]] = {
        "entry": [line.title for line in lines],
        "labels / class": [str(line.labels) for line in lines],
        "mode": [_mode(line) for line in lines],
        "mIoU %" if config.segments else "test %": [_mean(line, line.metric) for line in lines],
        "pixels %": [_mean(line, "test_pixel_accuracy") for line in lines],
        "gap, points": [line.gap.in_brackets() if line.gap else "" for line in lines],
        "p images": [_p(line.gap.p_images) if line.gap else "" for line in lines],
        "p seeds": [_p(line.gap.p_seeds) if line.gap else "" for line in lines],
        "top-5 %": [_mean(line, "test_top5") for line in lines],
        "train %": [_mean(line, line.metric.replace("test", "train")) for line in lines],
        "validation %": [_mean(line, line.metric.replace("test", "val")) for line in lines],
        "calibration error %": [_mean(line, "calibration_error") for line in lines],
        "parameters": [
            f"{count:,}" if (count := line.rows[0].values["parameters"]) else "" for line in lines
        ],
    }
    kept = {
        name: cells
        for name, cells in columns.items()
        if any(cells) and not (name in ("labels / class", "mode") and len(set(cells)) == 1)
    }
    return Table(list(kept), [list(row) for row in zip(*kept.values(), strict=True)])


def _pairs(lines: Sequence[Line]) -> Table | None:
    """Compares each pair of entries; None if the reference's column suffices."""
    if len(lines) < 3:
        return None
    body = []
    for line in lines:
        gaps = [None if other is line else line.gap_to(other) for other in lines]
        body.append([line.title, *(gap.in_brackets() if gap else "" for gap in gaps)])
    return Table(["above", *(line.title for line in lines)], body)


def _mode(line: Line) -> str:
    shots = line.rows[0].values.get("shots")
    return line.mode if shots is None else f"{line.mode}, {shots} a class"


def _costs(lines: Sequence[Line]) -> Table | None:
    def known(value: float | None, form: str) -> str:
        return "not known" if value is None else format(value, form)

    flops = ["pretraining FLOPs", "fine-tuning FLOPs"]
    head = ["entry", "labels / class", *flops, "images seen", "pretraining time", "fine-tuning time"]
    body = []
    for line in (line for line in lines if line.mode in TUNED_BY):
        seen = [line.mean("images_seen"), line.mean("pretrain_images_seen")]
        cells = [known(line.mean(name), ".3g") for name in ("pretrain_flops", "finetune_flops")]
        cells.append(known(None if None in seen else sum(filter(None, seen)), ",.0f"))
        for seconds in (line.mean("pretrain_s"), line.mean("finetune_s")):
            cells.append("not known" if seconds is None else format_duration(seconds))
        body.append([line.title, str(line.labels), *cells])
    return Table(head, body) if body else None


def _left_out(plan: ComparisonPlan) -> list[str]:
    """Says which pretraining data were prepared without near-duplicates of test images."""
    notes = []
    for name, section in plan.config.pretrain.items():
        try:
            splits = read_dataset(data_folder(plan.config.data.path, section.set)).splits
        except InputError:  # The data may be gone, for example on another machine.
            continue
        notes += [
            f"Left out of the pretraining images of {name}: {excluded.samples:,} that {excluded.source} has too "
            f"({excluded.hash}, at most {excluded.distance} apart)."
            for info in splits.values()
            for excluded in info.processing.excluded or ()
        ]
    return notes


def _markdown(table: Table) -> str:
    align = "---:" if table.numbers else "---"
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.head, *table.body)]
    first, *more = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([first, "| --- |" + f" {align} |" * (len(table.head) - 1), *more])


def _words(settings: Overrides) -> str:
    return ", ".join(override_words(settings))


def _mean(line: Line, column: str) -> str:
    mean, spread = line.mean(column), line.spread(column)
    if mean is None:
        return ""
    return format_decimal(100 * mean) + (f" ± {format_decimal(100 * spread)}" if spread is not None else "")


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
