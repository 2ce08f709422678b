"""`report.html`, one page that needs nothing beside it, and `report.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from mae_vit.core.errors import InputError
from mae_vit.core.messages import format_decimal
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import TUNED_BY, CompareConfig
from mae_vit.finetuning.comparison.inputs import data_folder
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.protocol import describe_changes
from mae_vit.finetuning.comparison.report import charts
from mae_vit.finetuning.comparison.report.answer import answer, first_chart
from mae_vit.finetuning.comparison.report.rows import Row, describe_labels
from mae_vit.finetuning.comparison.report.segmentation import OVERLAYS_CAPTION, SEGMENTATION_READING
from mae_vit.finetuning.comparison.report.summary import (
    Line,
    at_most_labels,
    lines_of,
    notes_of,
)
from mae_vit.finetuning.comparison.report.tried_settings import settings_of_all, settings_table
from mae_vit.pages import image, render

_READING = """Accuracy is top-1 accuracy on the test images ({size:,}, split {split}). Each run reads them once,
{chosen}. The table has the mean and standard deviation over seeds. The gap is the difference from the reference,
paired by seed and image. It is in parentheses if it may be chance. Its interval covers the choice of test images and
of seeds. {covered} another pretraining run. The first p is McNemar's exact test on the test images, for the seed with
the weakest evidence. The second is the paired t-test over seeds."""
_BEST = "after images held out of its labels have chosen the epoch"
_LAST = "with no labeled image held out to choose an epoch"
_TUNED = "Settings were chosen only on held-out images, each row's from the same number."
_ONE_SEED = "* With one seed, the interval covers only the choice of test images."
_MONITORED = """Pretraining reports its progress on the data's val split or, without one, on test images. This does not
affect any choice."""
_PAIRS = """Each cell is the test result of the row minus that of the column, in points, with its 95 % interval, for
the largest number of labels. Cells in parentheses may be chance. The intervals are not widened for the number of
comparisons."""


class Table(NamedTuple):
    """A table of texts."""

    head: list[str]
    body: list[list[str]]


class Section(NamedTuple):
    """A part of the page below its main table: a heading, and what there is of figure, table and note."""

    title: str
    figure: tuple[Markup, str] | None = None
    table: Table | None = None
    note: str = ""


class Report:
    """What the report of a comparison says, for both of its forms."""

    def __init__(self, plan: ComparisonPlan, rows: Sequence[Row], missing: Sequence[str]) -> None:
        """Puts it together.

        Args:
            plan: of the comparison.
            rows: the cells that are done.
            missing: names of the others.
        """
        self._plan, self._rows, self._config = plan, rows, plan.config
        self._lines = lines_of(plan.config, rows)
        self._missing = "; ".join(missing)
        self._table = _table(plan.config, self._lines)
        self._pairs = _pairs(plan.config, self._lines)
        self._settings = Table(*settings_table(plan))
        self.answer = answer(plan.config, self._lines)
        self.notes = notes_of(self._lines)
        self._reading = [" ".join(reading(plan.config, self._lines))] if self._lines else []
        self._provisos = [*_left_out(plan), *describe_changes(plan)]

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        parts = [f"# {self._config.run.name}", self.answer, _markdown(self._table)]
        parts += [*self.notes, *self._reading]
        parts += [_markdown(self._pairs), _PAIRS] if self._pairs else []
        parts += self._provisos
        parts += [f"Not finished: {self._missing}."] if self._missing else []
        parts += ["## Settings", _markdown(self._settings, align="---"), settings_of_all(self._plan)]
        return "\n\n".join(parts) + "\n"

    def to_html(self, masks: bytes | None = None) -> str:
        """Returns `report.html`; `masks`: a PNG of test images and their predicted classes."""
        palette = charts.Palette([entry.name for entry in self._config.entries])
        reference = [n for n, line in enumerate(self._lines) if line.entry == self._config.reference]
        return render(
            "comparison.html",
            title=self._config.run.name,
            answer=self.answer,
            first_chart=first_chart(self._config, self._rows, self._lines, palette),
            missing=self._missing,
            measured="Mean IoU" if self._config.segments else "Accuracy",
            table=self._table,
            marked=reference,
            notes=[*self.notes, *self._reading, *self._provisos],
            sections=self._sections(palette, masks),
        )

    def _sections(self, palette: charts.Palette, masks: bytes | None) -> list[Section]:
        sections = [Section("Each against each", table=self._pairs, note=_PAIRS)] if self._pairs else []
        for labels in dict.fromkeys(row.cell.labels for row in self._rows):
            if drawn := charts.curves(self._rows, palette, labels):
                caption = "Held-out images; mean and range over seeds."
                sections.append(Section(f"Learning curves, {describe_labels(labels)}", (drawn, caption)))
        if drawn := charts.against_compute(self._rows, palette):
            caption = (
                "Pretraining counts whole for each entry that begins from it, though one run serves all."
            )
            title = "Against compute" if self._config.segments else "Accuracy against compute"
            sections.append(Section(title, (drawn, caption), _costs(self._lines)))
        if masks:
            sections.append(Section("Masks", (image(masks, "masks"), OVERLAYS_CAPTION)))
        sections += _per_class(self._config, self._lines)
        sections.append(Section("Settings", table=self._settings, note=settings_of_all(self._plan)))
        for name, run in self._plan.pretraining.items():
            if pictures := sorted((run.run_folder / "pictures").glob("step-*.png")):
                drawn = image(pictures[-1].read_bytes(), name)
                caption = "held-out images; the original is the last row"
                sections.append(Section(f"Pretraining: {name}", (drawn, caption)))
        return sections


def reading(config: CompareConfig, lines: Sequence[Line]) -> list[str]:
    """Explains the numbers of a comparison, of which some are finished."""
    values = lines[0].rows[0].values
    covered = (
        "Each seed has its own draw of labels. It does not cover"
        if config.label_draws
        else "It does not cover another draw of labels or"
    )
    chosen = _BEST if any(row.values["val_size"] for line in lines for row in line.rows) else _LAST
    facts = {"size": values["test_size"], "split": values["test_split"], "covered": covered, "chosen": chosen}
    notes = [(SEGMENTATION_READING if config.segments else _READING).format(**facts)]
    notes += [_TUNED] if any(len(config.tuning_settings(entry)) > 1 for entry in config.entries) else []
    notes += [_ONE_SEED] if any(line.gap and line.gap.seeds == 1 for line in lines) else []
    notes += [_MONITORED] if config.pretrain else []
    return [" ".join(text.split()) for text in notes]


def _table(config: CompareConfig, lines: Sequence[Line]) -> Table:
    """Columns that say the same in every row are left out."""
    subset = config.test_subset
    columns: dict[str, list[str]] = {
        "entry": [line.title for line in lines],
        "labels / class": [str(line.labels) for line in lines],
        "mode": [_mode(line) for line in lines],
        "parameters": [
            f"{count:,}" if (count := line.rows[0].values["parameters"]) else "" for line in lines
        ],
        "mIoU %" if config.segments else "test %": [_mean(line, line.metric) for line in lines],
        "pixels %": [_mean(line, "test_pixel_accuracy") for line in lines],
        f"on {subset} %": [_mean(line, f"test_top1_{subset}") for line in lines] if subset else [],
        "gap, points": [line.gap.in_brackets() if line.gap else "" for line in lines],
        "p images": [_p(line.gap.p_images) if line.gap else "" for line in lines],
        "p seeds": [_p(line.gap.p_seeds) if line.gap else "" for line in lines],
        "top-5 %": [_mean(line, "test_top5") for line in lines],
        "train %": [_mean(line, line.metric.replace("test", "train")) for line in lines],
        "held-out %": [_mean(line, line.metric.replace("test", "val")) for line in lines],
        "ECE %": [_mean(line, "calibration_error") for line in lines],
    }
    kept = {
        name: cells
        for name, cells in columns.items()
        if any(cells) and not (name in ("labels / class", "mode") and len(set(cells)) == 1)
    }
    return Table(list(kept), [list(row) for row in zip(*kept.values(), strict=True)])


def _pairs(config: CompareConfig, lines: Sequence[Line]) -> Table | None:
    """Compares each pair of entries; None if the reference's column suffices."""
    compared = at_most_labels(config, lines)
    if len(compared) < 3:
        return None
    body = [[line.title, *(_gap(line, other) for other in compared)] for line in compared]
    return Table(["above", *(line.title for line in compared)], body)


def _gap(line: Line, other: Line) -> str:
    gap = None if other is line else line.gap_to(other)
    return gap.in_brackets() if gap else ""


def _mode(line: Line) -> str:
    shots = line.rows[0].values.get("shots")
    return line.mode if shots is None else f"{line.mode}, {shots} a class"


def _costs(lines: Sequence[Line]) -> Table:
    flops = ["pretraining FLOPs", "fine-tuning FLOPs"]
    head = ["entry", "labels / class", *flops, "images seen", "hours, pretraining", "hours, fine-tuning"]
    body = []
    for line in lines:
        if line.mode not in TUNED_BY:
            continue
        images = [line.mean("images_seen"), line.mean("pretrain_images_seen")]
        seconds = [line.mean("pretrain_s"), line.mean("finetune_s")]
        body.append(
            [
                line.title,
                str(line.labels),
                _known(line.mean("pretrain_flops"), ".2e"),
                _known(line.mean("finetune_flops"), ".2e"),
                _known(None if None in images else sum(filter(None, images)), ",.0f"),
                *(_known(None if value is None else value / 3600, ".3g") for value in seconds),
            ]
        )
    return Table(head, body)


def _known(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)


def _per_class(config: CompareConfig, lines: Sequence[Line]) -> list[Section]:
    """Gains over the reference by class, at the most labels."""
    by_entry = {line.entry: line for line in at_most_labels(config, lines) if line.mode in TUNED_BY}
    base = by_entry.pop(config.reference, None)
    if base is None or not by_entry:
        return []
    body = []
    for name in sorted(base.rows[0].per_class)[:100]:
        own = _class_mean(base, name)
        gains = [format_decimal(100 * (_class_mean(line, name) - own), "+") for line in by_entry.values()]
        body.append([name, format_decimal(100 * own), *gains])
    head = ["class", f"{base.title}, %", *(line.title for line in by_entry.values())]
    return [Section(f"Gain by class over {config.reference}, in points", table=Table(head, body))]


def _class_mean(line: Line, name: str) -> float:
    return sum(row.per_class.get(name, 0.0) for row in line.rows) / len(line.rows)


def _left_out(plan: ComparisonPlan) -> list[str]:
    """Says which pretraining data were prepared without near-duplicates of test images."""
    notes = []
    for name, section in plan.config.pretrain.items():
        try:
            splits = read_dataset(data_folder(plan.config.data.path, section.set)).splits
        except InputError:  # A report is written without the data, too: on another machine, say.
            continue
        notes += [
            f"Left out of the pretraining images of {name}: {excluded.samples:,} that {excluded.source} has too "
            f"({excluded.hash}, at most {excluded.distance} apart)."
            for info in splits.values()
            for excluded in info.processing.excluded or ()
        ]
    return notes


def _markdown(table: Table, *, align: str = "---:") -> str:
    first, *more = ["| " + " | ".join(row) + " |" for row in (table.head, *table.body)]
    return "\n".join([first, "| --- |" + f" {align} |" * (len(table.head) - 1), *more])


def _mean(line: Line, column: str) -> str:
    mean, spread = line.mean(column), line.spread(column)
    if mean is None:
        return ""
    return format_decimal(100 * mean) + (f" ± {format_decimal(100 * spread)}" if spread is not None else "")


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
