"""`report.html`, one page that needs nothing beside it, and `report.md`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mae_vit.core.errors import InputError
from mae_vit.core.messages import format_decimal
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import TUNED_BY, CompareConfig
from mae_vit.finetuning.comparison.inputs import data_folder
from mae_vit.finetuning.comparison.matrix.matrix import Matrix
from mae_vit.finetuning.comparison.protocol import describe_changes
from mae_vit.finetuning.comparison.report import charts
from mae_vit.finetuning.comparison.report.answer import answer, first_chart
from mae_vit.finetuning.comparison.report.encoder_views import INSPECTION, best_attention
from mae_vit.finetuning.comparison.report.rows import Row, describe_labels
from mae_vit.finetuning.comparison.report.segmentation import (
    OVERLAYS_CAPTION,
    SEGMENTATION_READING,
    overlays,
)
from mae_vit.finetuning.comparison.report.summary import (
    Line,
    at_most_labels,
    each_against_each,
    headline,
    lines_of,
    notes_of,
)
from mae_vit.finetuning.comparison.report.tried_settings import settings_of_all, settings_table
from mae_vit.inspection.page import html

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


def write_text(matrix: Matrix, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """Returns `report.md`."""
    config = matrix.config
    lines = lines_of(config, rows)
    head, body = _table(matrix, lines)
    text = [f"# {config.run.name}", ""]
    text += [line for part in (answer(config, lines), headline(config, lines)) if part for line in (part, "")]
    text += [*_markdown_table(head, body), ""]
    if notes := notes_of(lines):
        text += [*(f"- {note}" for note in notes), ""]
    text += [" ".join(_reading(config, lines)), ""]
    if pairs := _pairs(config, lines):
        text += [*_markdown_table(*pairs), "", _PAIRS, ""]
    for note in (_left_out(matrix), *describe_changes(matrix.folder)):
        text += [note, ""] if note else []
    if missing:
        text += ["Not finished: " + "; ".join(missing) + ".", ""]
    text += [
        "## Settings",
        "",
        *_markdown_table(*settings_table(matrix), align="---"),
        "",
        settings_of_all(matrix),
        "",
    ]
    return "\n".join(text)


def write_page(
    matrix: Matrix, rows: Sequence[Row], missing: Sequence[str], *, inspected: bool = False
) -> str:
    """Returns `report.html`; `inspected`: the page of what was learned lies beside it."""
    config = matrix.config
    lines = lines_of(config, rows)
    palette = charts.Palette([entry.name for entry in config.entries])
    parts = [
        f"<h1>{escape(config.run.name)}</h1>",
        f'<p class="headline">{escape(answer(config, lines) or headline(config, lines))}</p>',
    ]
    if chart := first_chart(config, rows, lines, palette):
        parts += [html.figure(*chart), f'<p class="note">{escape(headline(config, lines))}</p>']
    if missing:
        parts.append(f"<p><strong>Not finished:</strong> {escape('; '.join(missing))}.</p>")
    parts += [
        "<h2>Mean IoU</h2>" if config.segments else "<h2>Accuracy</h2>",
        html.table(
            *_table(matrix, lines), [n for n, line in enumerate(lines) if line.entry == config.reference]
        ),
    ]
    parts += [
        f'<p class="note">{escape(note)}</p>'
        for note in (
            *notes_of(lines),
            " ".join(_reading(config, lines)),
            _left_out(matrix),
            *describe_changes(matrix.folder),
        )
        if note
    ]
    if pairs := _pairs(config, lines):
        parts += ["<h2>Each against each</h2>", html.table(*pairs), f'<p class="note">{_PAIRS}</p>']
    labels = list(dict.fromkeys(row.cell.labels for row in rows))
    for count in labels:
        if drawn := charts.curves(rows, palette, count):
            parts += [
                f"<h2>Learning curves, {describe_labels(count)}</h2>",
                html.figure(drawn, "Held-out images; mean and range over seeds."),
            ]
    if drawn := charts.against_compute(rows, palette):
        caption = "Pretraining counts whole for each entry that begins from it, though one run serves all."
        parts += [
            "<h2>Against compute</h2>" if config.segments else "<h2>Accuracy against compute</h2>",
            html.figure(drawn, caption),
            html.table(*_costs(lines)),
        ]
    if masks := overlays(config, rows):
        parts += ["<h2>Masks</h2>", html.figure(html.image(masks, "masks"), OVERLAYS_CAPTION)]
    parts += _per_class(config, lines)
    parts += _settings(matrix)
    parts += _attention(matrix, rows)
    if inspected:
        where = f"{INSPECTION}/index.html"
        parts.append(
            f'<p><a href="{where}">What the best has learned that the reference has not</a>: both side by side '
            "(attention, how far heads look, positions, filters, neighbors).</p>"
        )
    parts += _pictures(matrix)
    return html.page(config.run.name, parts)


def _reading(config: CompareConfig, lines: Sequence[Line]) -> list[str]:
    """Explains the numbers of this comparison."""
    if not lines:
        return []
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


def _table(matrix: Matrix, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Columns that say the same in every row are left out."""
    subset = matrix.config.test_subset
    columns: dict[str, list[str]] = {
        "entry": [line.title for line in lines],
        "labels / class": [str(line.labels) for line in lines],
        "mode": [_mode(line) for line in lines],
        "parameters": [
            f"{count:,}" if (count := line.rows[0].values["parameters"]) else "" for line in lines
        ],
        "mIoU %" if matrix.config.segments else "test %": [_mean(line, line.metric) for line in lines],
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
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _pairs(config: CompareConfig, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]] | None:
    """Compares each pair of entries; None if the reference's column suffices."""
    compared = at_most_labels(config, lines)
    if len(compared) < 3:
        return None
    body = [
        [line.title, *("" if gap is None else gap.in_brackets() for gap in gaps)]
        for line, gaps in each_against_each(compared)
    ]
    return ["above", *(line.title for line in compared)], body


def _mode(line: Line) -> str:
    shots = line.rows[0].values.get("shots")
    return line.mode if shots is None else f"{line.mode}, {shots} a class"


def _costs(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    head = [
        "entry",
        "labels / class",
        "pretraining FLOPs",
        "fine-tuning FLOPs",
        "images seen",
        "hours, pretraining",
        "hours, fine-tuning",
    ]
    body = []
    for line in lines:
        if line.mode not in TUNED_BY:
            continue
        images = [line.mean("images_seen"), line.mean("pretrain_images_seen")]
        hours = [
            None if (s := line.mean(name)) is None else s / 3600 for name in ("pretrain_s", "finetune_s")
        ]
        body.append(
            [
                line.title,
                str(line.labels),
                _known(line.mean("pretrain_flops"), ".2e"),
                _known(line.mean("finetune_flops"), ".2e"),
                _known(None if None in images else sum(filter(None, images)), ",.0f"),
                *(_known(value, ".3g") for value in hours),
            ]
        )
    return head, body


def _known(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)


def _per_class(config: CompareConfig, lines: Sequence[Line]) -> list[str]:
    """Gains over the reference by class, at the most labels."""
    by_entry = {line.entry: line for line in at_most_labels(config, lines) if line.mode in TUNED_BY}
    base = by_entry.pop(config.reference, None)
    if base is None or not by_entry:
        return []
    classes = sorted(base.rows[0].per_class)
    body = []
    for name in classes[:100]:
        own = _class_mean(base, name)
        body.append(
            [
                name,
                format_decimal(100 * own),
                *(format_decimal(100 * (_class_mean(line, name) - own), "+") for line in by_entry.values()),
            ]
        )
    return [
        f"<h2>Gain by class over {escape(config.reference)}, in points</h2>",
        html.table(["class", f"{base.title}, %", *(line.title for line in by_entry.values())], body),
    ]


def _class_mean(line: Line, name: str) -> float:
    return sum(row.per_class.get(name, 0.0) for row in line.rows) / len(line.rows)


def _settings(matrix: Matrix) -> list[str]:
    note = f'<p class="note">{escape(settings_of_all(matrix))}</p>'
    return ["<h2>Settings</h2>", html.table(*settings_table(matrix)), note]


def _left_out(matrix: Matrix) -> str:
    """Says which pretraining data were prepared without near-duplicates of test images."""
    notes = []
    for name, section in matrix.config.pretrain.items():
        try:
            splits = read_dataset(data_folder(matrix.config, section.set)).splits
        except InputError:  # as below
            continue
        notes += [
            f"Left out of the pretraining images of {name}: {excluded.samples:,} that {excluded.source} has too "
            f"({excluded.hash}, at most {excluded.distance} apart)."
            for info in splits.values()
            for excluded in info.processing.excluded or ()
        ]
    return " ".join(notes)


def _attention(matrix: Matrix, rows: Sequence[Row]) -> list[str]:
    """A report is written without the data too: on another machine, say."""
    try:
        found = best_attention(matrix.config, rows)
    except InputError:
        return []
    if found is None:
        return []
    title, picture = found
    return ["<h2>Attention</h2>", html.figure(html.image(picture, "attention maps"), title)]


def _pictures(matrix: Matrix) -> list[str]:
    parts: list[str] = []
    for name, job in matrix.pretraining.items():
        pictures = sorted((job.folder / "pictures").glob("step-*.png"))
        if pictures:
            image = html.image(pictures[-1].read_bytes(), name)
            caption = "held-out images; the original is the last row"
            parts.append(f"<h2>Pretraining: {escape(name)}</h2>" + html.figure(image, caption))
    return parts


def _markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], *, align: str = "---:") -> list[str]:
    rows = ["| " + " | ".join(row) + " |" for row in (head, *body)]
    return [rows[0], "| --- |" + f" {align} |" * (len(head) - 1), *rows[1:]]


def _mean(line: Line, column: str) -> str:
    mean, spread = line.mean(column), line.spread(column)
    if mean is None:
        return ""
    return format_decimal(100 * mean) + (f" ± {format_decimal(100 * spread)}" if spread is not None else "")


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
