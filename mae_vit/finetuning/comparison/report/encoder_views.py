"""Attention maps of a comparison's Vision Transformers, and the inspection of the best beside the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from mae_vit.core.urls import is_url
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.inputs import data_folder
from mae_vit.finetuning.comparison.report.rows import Row, describe_labels
from mae_vit.inspection.attention import attention_weights
from mae_vit.inspection.drawing import to_png
from mae_vit.inspection.images import draw_samples
from mae_vit.inspection.inspect import inspect
from mae_vit.inspection.views import block_view
from mae_vit.models.encoder_file import read_metadata
from mae_vit.weights.encoder import load_vit

# Beside the report.
INSPECTION = "inspect"
_IMAGES = 6
# For a page of a comparison: enough to see, seconds to draw.
_INSPECTED = 200


def best_attention(config: CompareConfig, rows: Sequence[Row]) -> tuple[str, bytes] | None:
    """Draws where the last block of the best Vision Transformer looks.

    Args:
        config: of the comparison.
        rows: finished cells.

    Returns:
        What it is, and a PNG: a line for each of some test images, the image and a map for
        each head; None without a Vision Transformer.

    Raises:
        InputError: if the data are not there.
    """
    best = _best_vit(rows)
    if best is None:
        return None
    model = load_vit(best.cell.job.folder)
    samples = draw_samples(
        data_of(config), count=_IMAGES, encoder=model.info, split=best.values["test_split"]
    )
    (weights,) = attention_weights(model.encoder, model.normalize(samples.images), blocks=[-1])
    view = block_view(model, samples.shown(), weights, len(model.encoder.blocks) - 1)
    return f"{_name(best)}. {view.title}. {view.reading}", to_png(view.drawn)


def write_inspection(config: CompareConfig, rows: Sequence[Row], folder: Path) -> Path | None:
    """Writes a page that shows the reference and the best other Vision Transformer side by side.

    Returns:
        Its path; None without two such encoders.

    Raises:
        InputError: if the data are not there.
    """
    before = _best_vit([row for row in rows if row.cell.entry.name == config.reference])
    after = _best_vit([row for row in rows if row.cell.entry.name != config.reference])
    if before is None or after is None:
        return None
    return inspect(
        [str(row.cell.job.folder) for row in (before, after)],
        data_of(config),
        folder / INSPECTION,
        images=_INSPECTED,
        split=after.values["test_split"],
        names=[_name(row) for row in (before, after)],
    )


def data_of(config: CompareConfig) -> str:
    """Returns the images of the cells: where they were prepared, if the comparison has a cache folder of its own."""
    path = config.data.path
    own = "data.cache_dir" in config.set and not is_url(path)
    return str(data_folder(config, config.set)) if own else path


def _best_vit(rows: Sequence[Row]) -> Row | None:
    for row in sorted(rows, key=lambda row: -row.score):
        path = row.cell.job.folder / "model.safetensors"
        if not path.exists():
            continue
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
        # One that was distilled has a second token, which the views do not know.
        if "patch_size" in read_metadata(path) and "dist_token" not in names:
            return row
    return None


def _name(row: Row) -> str:
    return f"{row.cell.entry.name}, {describe_labels(row.cell.labels)}, seed {row.cell.seed}"
