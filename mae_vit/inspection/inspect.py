"""Opens and inspects one encoder, or two side by side."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from markupsafe import Markup

from mae_vit.config.load import load_config, read_run_config
from mae_vit.core.errors import InputError
from mae_vit.core.files import check_not_current, replace_folder, temporary_name
from mae_vit.core.messages import count_of, error_reason
from mae_vit.inspection.figures import View, to_png
from mae_vit.inspection.images import Samples, draw_samples
from mae_vit.inspection.views import all_views
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pages import charts, image, render
from mae_vit.training.checkpoints.checkpoint import STATE
from mae_vit.weights.encoder import PretrainedEncoder, encoder_from_weights
from mae_vit.weights.load import load_weights
from mae_vit.weights.mae_decoder import read_decoder
from mae_vit.weights.read import Weights, read_weights

INDEX = "index.html"
# Lists the folder's contents: a folder with other files is not replaced.
_CONTENTS = "inspection.json"
# Folders of two compared encoders.
_SIDES = ("a", "b")


@dataclass(frozen=True)
class InspectedEncoder:
    """An encoder under inspection.

    Attributes:
        source: weights as the user named them.
        model: encoder, read-out and normalization.
        objective: trained objective around the encoder; None if the weights hold only the encoder.
        why_no_objective: the reason, for the page.
        picture_bands: the bands that images are drawn in, from its run; None chooses.
        title: name of its run, or the last part of the path to a file.
    """

    source: str
    model: PretrainedEncoder
    objective: Objective | None
    why_no_objective: str
    picture_bands: tuple[int | str, ...] | None
    title: str


def open_subject(source: str) -> InspectedEncoder:
    """Opens the weights that `--ckpt` names, with the picture bands of their run.

    Raises InputError if they are no Vision Transformer.
    """
    weights = read_weights(source)
    model = encoder_from_weights(weights)
    _ = model.info.vit  # other families have no attention to show
    for note in model.notes(source):
        print(note, file=sys.stderr)
    bands, title = None, Path(source).name
    if (Path(source) / "config.yaml").is_file():
        # The folder of a third-party encoder may have a config.yaml of another kind.
        monitor, section = map(read_run_config(Path(source)).get, ("monitor", "run"))
        wanted = monitor.get("picture_bands") if isinstance(monitor, dict) else None
        bands = tuple(wanted) if isinstance(wanted, list) else None
        title = str(section.get("name") or title) if isinstance(section, dict) else title
    objective, why = _open_objective(source, weights, model)
    return InspectedEncoder(source, model, objective, why, bands, title)


def _open_objective(source: str, weights: Weights, model: PretrainedEncoder) -> tuple[Objective | None, str]:
    """Opens the objective with its decoder or head, or returns None and the reason."""
    if decoder := read_decoder(weights, model.encoder, model.info):
        for note in decoder.notes:
            print(f"note: {source}: {note}", file=sys.stderr)
        return decoder.mae, "" if decoder.mae else "the number of heads of its decoder is not known"
    if not (weights.path / STATE).is_file() or weights.objective is None:
        if any(name.startswith(("fc_norm.", "head.", "decode_head.")) for name in weights.tensors):
            return None, "it was fine-tuned, so it has no decoder"
        return (
            None,
            "the file has only an encoder; if its run masked images, the run folder has the decoder, too",
        )
    config = load_config(PretrainConfig, Path(source) / "config.yaml", imports_plugins=False)
    section, info = config.objective, model.info
    if section.uses_labels:
        return None, "it was trained on labels, so it has no decoder"
    objective = section.build(model.encoder, mean=info.mean, std=info.std, bands=info.bands)
    if not objective.mask_ratio:
        return None, "it was trained without masks"
    load_weights(weights, objective.encoder, objective, objective=section.name)
    return objective.eval(), ""


class WrittenView(NamedTuple):
    """A view, its picture as an element of the page, and its files, named from the page's folder."""

    view: View
    picture: Markup
    files: list[str]


def inspect(
    sources: Sequence[str],
    data: str,
    out: Path,
    *,
    images: int,
    split: str | None,
    device: torch.device,
) -> Path:
    """Writes pictures (PNG), their numbers (CSV) and one page that shows all; returns the page's path.

    `sources` are the weights of one encoder, or of two to compare; `data` prepared shards, a folder of images or an
    archive. A new inspection replaces an earlier one in `out` once it is complete. Raises InputError if weights or
    images cannot be read, or `out` is no inspection.
    """
    check_not_current(out)
    _check_place(out)
    subjects = [open_subject(source) for source in sources]
    partial = temporary_name(out)
    try:
        parts = []
        for side, subject in zip(_SIDES, subjects, strict=False):
            samples = draw_samples(data, count=images, encoder=subject.model.info, split=split)
            samples = replace(samples, picture_bands=subject.picture_bands)
            if samples.passed_over:
                passed = count_of(samples.passed_over, "image")
                print(f"note: {passed} of {data} cannot be decoded, and others are shown", file=sys.stderr)
            # The data's bands, which mark missing values.
            subject.model.input = replace(subject.model.input, bands=samples.bands)
            if subject.objective is not None:
                subject.objective.bands = samples.bands
            folder = partial / side if len(subjects) > 1 else partial
            folder.mkdir(parents=True)
            parts.append((subject, samples, _write_views(subject, samples, folder, partial, device)))
        page = _page(parts)
        (partial / INDEX).write_bytes(page.encode("utf-8", "replace"))
        contents = sorted(path.name for path in partial.iterdir())
        (partial / _CONTENTS).write_text(json.dumps({"inspection": contents}), encoding="utf-8")
        replace_folder(partial, out)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error_reason(error)}; give --out DIR") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out / INDEX


def _check_place(out: Path) -> None:
    """Checks that only an earlier inspection would be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder")
    there = {path.name for path in out.iterdir()}
    try:
        known = {_CONTENTS, *json.loads((out / _CONTENTS).read_text(encoding="utf-8"))["inspection"]}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    if strangers := sorted(there - known):
        raise InputError(
            f"--out {out} has {strangers[0]}, which mae-vit inspect did not write; give an empty folder"
        )


def _write_views(
    subject: InspectedEncoder, samples: Samples, folder: Path, root: Path, device: torch.device
) -> list[WrittenView]:
    for part in (subject.model, subject.objective):
        if part is not None:
            part.to(device)
    written = []
    for view in all_views(subject.model, subject.objective, samples):
        png, path = to_png(view.drawn), folder / view.name
        path.with_suffix(".png").write_bytes(png)
        files = [path.with_suffix(".png")]
        if view.table is not None:
            files.append(path.with_suffix(".csv"))
            with files[-1].open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
                csv.writer(file, lineterminator="\n").writerows([view.table[0], *view.table[1]])
        names = [file.relative_to(root).as_posix() for file in files]
        picture = image(png, view.title) if isinstance(view.drawn, np.ndarray) else charts.to_svg(view.drawn)
        written.append(WrittenView(view, picture, names))
        print(f"  {view.title} ({names[0]})", file=sys.stderr, flush=True)
    return written


def _page(parts: Sequence[tuple[InspectedEncoder, Samples, list[WrittenView]]]) -> str:
    titles = [subject.title for subject, _, _ in parts]
    by_name = [{item.view.name: item for item in written} for _, _, written in parts]
    views = []
    for name in dict.fromkeys(name for side in by_name for name in side):
        sides = [side.get(name) for side in by_name]
        views.append((next(item.view for item in sides if item), sides))
    return render(
        "inspection.html",
        title=" and ".join(titles),
        titles=titles,
        findings=[
            " and ".join(filter(None, (item.view.finding for item in side.values()))) for side in by_name
        ],
        facts=[_facts(subject, samples) for subject, samples, _ in parts],
        views=views,
    )


def _facts(subject: InspectedEncoder, samples: Samples) -> dict[str, str]:
    info = subject.model.info
    height, width = info.img_size
    unfinished = subject.model.weights.remarks.get("unfinished")
    facts = {
        "weights": subject.source + (f" ({unfinished})" if unfinished else ""),
        "objective": info.objective + (f", {info.step:,} steps" if info.step else ""),
        "encoder": f"{count_of(info.vit.depth, 'block')} of {count_of(info.vit.num_heads, 'head')}, "
        f"width {info.vit.embed_dim}, "
        f"patches of {info.vit.patch_size} px in {height} x {width}, read by {subject.model.pool}",
        "images": f"{count_of(len(samples.images), 'image')} of {samples.source}",
    }
    if not samples.bands.photographs:
        facts["bands"] = f"{', '.join(samples.bands.names)} ({samples.bands.dtype})"
    if samples.passed_over:
        facts["passed over"] = f"{count_of(samples.passed_over, 'image')} that cannot be decoded"
    if subject.why_no_objective:
        facts["no reconstructions"] = subject.why_no_objective
    return facts
