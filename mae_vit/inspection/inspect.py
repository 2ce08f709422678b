"""Writes the inspection of one encoder, or of two side by side."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np
import torch

from mae_vit.core.errors import InputError
from mae_vit.core.files import replace_folder, temporary_name
from mae_vit.core.messages import count_of, error_reason
from mae_vit.inspection.drawing import to_png
from mae_vit.inspection.images import Samples, draw_samples
from mae_vit.inspection.page import html
from mae_vit.inspection.subject import InspectedEncoder, open_subject
from mae_vit.inspection.views import CONDITIONAL, View, all_views

INDEX = "index.html"
# Lists the folder's contents: a folder with other files is not replaced.
_CONTENTS = "inspection.json"
# The first column of two, and the second.
_SIDES = ("a", "b")


@dataclass(frozen=True)
class WrittenView:
    """A view and its files.

    Attributes:
        view: the picture and its text.
        png: its picture, encoded.
        files: of its numbers, named from the page's folder.
    """

    view: View
    png: bytes
    files: list[str]


def inspect(
    sources: Sequence[str],
    data: str,
    out: Path,
    *,
    images: int,
    split: str | None = None,
    norm_pix_loss: bool = False,
    device: torch.device | None = None,
    names: Sequence[str] = (),
) -> Path:
    """Writes pictures (PNG), their numbers (CSV, NPZ) and one page that shows all.

    Args:
        sources: one start, or two to be compared.
        data: prepared shards, a folder of images or an archive.
        out: folder; a new inspection replaces an earlier one once it is complete.
        images: how many are looked at.
        split: of prepared data.
        norm_pix_loss: of official files with a decoder.
        device: that computes; the CPU by default.
        names: titles of the sources on the page; by default their own names.

    Returns:
        Path of the page.

    Raises:
        InputError: if there is nothing to look at or with, or `out` is something else.
    """
    _check_place(out)
    subjects = [open_subject(source, norm_pix_loss=norm_pix_loss) for source in sources]
    partial = temporary_name(out)
    try:
        parts = []
        for side, subject in zip(_SIDES, subjects, strict=False):
            samples = draw_samples(data, count=images, encoder=subject.model.info, split=split)
            samples = replace(samples, picture_bands=subject.picture_bands)
            _take_bands(subject, samples)
            folder = partial / side if len(subjects) > 1 else partial
            folder.mkdir(parents=True)
            parts.append((subject, samples, _write_views(subject, samples, folder, partial, device)))
        (partial / INDEX).write_text(
            _page(parts, names or [subject.name for subject in subjects]), encoding="utf-8"
        )
        contents = sorted(path.name for path in partial.iterdir())
        (partial / _CONTENTS).write_text(json.dumps({"inspection": contents}), encoding="utf-8")
        replace_folder(partial, out)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error_reason(error)}; give --out DIR") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out / INDEX


def _take_bands(subject: InspectedEncoder, samples: Samples) -> None:
    """Lets encoder and objective know the data's mark of missing values."""
    subject.model.info = replace(subject.model.info, bands=samples.bands)
    if subject.objective is not None:
        subject.objective.bands = samples.bands


def _check_place(out: Path) -> None:
    """Checks that only an earlier inspection would be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out {out} is a file: give a folder")
    there = {path.name for path in out.iterdir()}
    try:
        known = {_CONTENTS, *json.loads((out / _CONTENTS).read_text(encoding="utf-8"))["inspection"]}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    if strangers := sorted(there - known):
        raise InputError(f"--out {out} holds {strangers[0]}, which is of no inspection: give another folder")


def _write_views(
    subject: InspectedEncoder, samples: Samples, folder: Path, root: Path, device: torch.device | None
) -> list[WrittenView]:
    for part in (subject.model, subject.objective):
        if part is not None:
            part.to(device or "cpu")
    seen = []
    for view in all_views(subject, samples):
        png, path = to_png(view.drawn), folder / view.name
        path.with_suffix(".png").write_bytes(png)
        files = [path.with_suffix(".png")]
        if view.table is not None:
            files.append(path.with_suffix(".csv"))
            with files[-1].open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
                csv.writer(file, lineterminator="\n").writerows([view.table[0], *view.table[1]])
        if view.arrays:
            files.append(path.with_suffix(".npz"))
            np.savez_compressed(files[-1], **view.arrays)  # type: ignore[arg-type]
        seen.append(WrittenView(view, png, [file.relative_to(root).as_posix() for file in files]))
        print(f"  {view.title}", file=sys.stderr, flush=True)
    for text in _left_out(seen):
        print(f"  left out: {text}", file=sys.stderr, flush=True)
    return seen


def _left_out(seen: Sequence[WrittenView]) -> list[str]:
    """Which views these images do not allow, and why."""
    there = {one.view.name for one in seen}
    return [f"{title} ({takes})" for name, (title, takes) in CONDITIONAL.items() if name not in there]


def _page(parts: Sequence[tuple[InspectedEncoder, Samples, list[WrittenView]]], names: Sequence[str]) -> str:
    title = " and ".join(names)
    body = [
        f"<h1>{escape(title)}</h1>",
        _in_columns([_facts(*part) for part in parts], names),
    ]
    by_name = [{one.view.name: one for one in seen} for _, _, seen in parts]
    for name in dict.fromkeys(name for side in by_name for name in side):
        first = next(side[name] for side in by_name if name in side)
        body.append(f"<h2>{escape(first.view.title)}</h2>")
        body.append(f'<p class="note">{escape(first.view.reading)}</p>')
        body.append(_in_columns([_shown(side.get(name)) for side in by_name], names))
    return html.page(title, body)


def _facts(subject: InspectedEncoder, samples: Samples, seen: Sequence[WrittenView]) -> str:
    info = subject.model.info
    height, width = info.img_size
    unfinished = subject.model.start.unfinished
    facts = {
        "weights": subject.name + (f" ({unfinished})" if unfinished else ""),
        "objective": info.objective + (f", {info.step:,} steps" if info.step else ""),
        "encoder": f"{info.vit.depth} blocks of {info.vit.num_heads} heads, width {info.vit.embed_dim}, patches of "
        f"{info.vit.patch_size} px in {height} x {width}, read by {subject.model.pool}",
        "images": f"{count_of(len(samples), 'image')} of {samples.source}",
    }
    if samples.bands is not None:
        facts["bands"] = f"{', '.join(samples.bands.names)} ({samples.bands.dtype})"
    if samples.passed_over:
        facts["passed over"] = f"{count_of(samples.passed_over, 'image')} that cannot be decoded"
    if subject.why_no_objective:
        facts["no reconstructions"] = subject.why_no_objective
    if left_out := _left_out(seen):
        facts["left out"] = "; ".join(left_out)
    return html.facts(facts)


def _shown(seen: WrittenView | None) -> str:
    if seen is None:
        return '<p class="note">nothing of this</p>'
    links = ", ".join(f'<a href="{escape(file)}">{escape(file)}</a>' for file in seen.files)
    picture = html.image(seen.png, seen.view.title, squares=isinstance(seen.view.drawn, np.ndarray))
    return f'{picture}<p class="note">{links}</p>'


def _in_columns(cells: Sequence[str], names: Sequence[str]) -> str:
    if len(cells) == 1:
        return cells[0]
    sides = [
        f'<div><p class="side">{escape(name)}</p>{cell}</div>'
        for cell, name in zip(cells, names, strict=True)
    ]
    return '<div class="pair">' + "".join(sides) + "</div>"
