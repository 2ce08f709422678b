"""Embeds images into a file; a call that was stopped or killed resumes."""

from __future__ import annotations

import csv
import io
import os
import time
import zipfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, write_atomically
from mae_vit.core.messages import plain_text
from mae_vit.core.progress import progress
from mae_vit.runtime.signals import StopRequest
from mae_vit.weights.embed.features import Features, Settings, compute_features
from mae_vit.weights.embed.identity import check_same_features, make_facts
from mae_vit.weights.embed.images import Images
from mae_vit.weights.embed.output import columns_of, read_facts, require_parquet, write_output
from mae_vit.weights.embed.unfinished import Unfinished
from mae_vit.weights.encoder import PretrainedEncoder

SUFFIXES = (".npz", ".parquet")
# Features are saved this often, later after each hundredth of the time gone.
SAVE_EVERY_S = 5.0
_SHARE_OF_TIME = 0.01
_MOST_BYTES_UNSAVED = 64 << 20


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    Attributes:
        total: images of the source.
        begun: images that were done before it.
        done: images that are done now, broken ones among them.
        rows: of the output; None if a signal came before it was written.
        width: D.
        broken: where each image lies that is passed over, and why.
        wall_s: seconds of computing.
    """

    total: int
    begun: int
    done: int
    rows: int | None
    width: int
    broken: Sequence[str] = ()
    wall_s: float = 0.0


def embed(
    encoder: PretrainedEncoder,
    images: Images,
    out: Path,
    settings: Settings,
    *,
    restart: bool = False,
    save_every_s: float = SAVE_EVERY_S,
    stop: StopRequest | None = None,
) -> Outcome:
    """Writes the features of all images that can be read to `out`, and `OUT.broken.csv` of the others.

    The folder `OUT.parts` holds what is done until the output is whole. A call with the same arguments resumes
    from there and ends with the same bytes.

    Args:
        encoder: on the settings' device.
        images: in order.
        out: a .npz or .parquet file.
        settings: of the computation. Device, batch size and workers may change between calls;
            the first two change the last bits of what is computed from then on.
        restart: begin again; an earlier output stays until the new one is whole.
        save_every_s: how much work a kill may cost, about.
        stop: asked after each batch.

    Raises:
        InputError: if another process writes `out`, if it or its parts hold other features, or if no image
            can be read.
    """
    check_out(out)
    facts = make_facts(encoder, images, settings)
    unfinished = Unfinished(out)
    try:
        if restart or not _resumes(unfinished, out, facts):
            if out.exists() and not restart:
                return _nothing_to_do(images, out)
            unfinished.begin(facts)
        begun, started = unfinished.done, time.monotonic()
        unfinished.open((len(images), encoder.embed_dim), settings.dtype)
        _compute(encoder, images, unfinished, settings, save_every_s, stop)
        outcome = Outcome(len(images), begun, unfinished.done, None, encoder.embed_dim)
        outcome = replace(outcome, wall_s=time.monotonic() - started)
        return _publish(outcome, unfinished, images, facts, out) if outcome.done == len(images) else outcome
    finally:
        unfinished.release()


def check_out(out: Path) -> None:
    """Makes sure that the output can be one.

    Raises:
        InputError: if its format is not known, or cannot be written here.
    """
    if out.suffix not in SUFFIXES:
        raise InputError(f"--out {out}: the name ends in {' or '.join(SUFFIXES)}, which says the format")
    if out.is_dir():
        raise InputError(
            f"--out {out} is a folder: give a file in it, such as {out / f'features{SUFFIXES[0]}'}"
        )
    if out.suffix == ".parquet":
        require_parquet()


def broken_path(out: Path) -> Path:
    """Where the images are named that are passed over."""
    return out.with_name(f"{out.name}.broken.csv")


def _resumes(unfinished: Unfinished, out: Path, facts: dict[str, Any]) -> bool:
    """Whether there is something to resume, which must be of the same features, as must the output."""
    found = unfinished.read_identity()
    if found is not None:
        check_same_features(found, facts, where=unfinished.folder)
    elif out.exists():
        check_same_features(_read_facts(out), facts, where=out)
    return found is not None


def _read_facts(out: Path) -> dict[str, Any]:
    try:
        return read_facts(out)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise InputError(f"{out} is there, and no file of `mae-vit embed`: give another --out") from None


def _nothing_to_do(images: Images, out: Path) -> Outcome:
    known = _read_facts(out)
    total = len(images)
    return Outcome(total, total, total, known["rows"], known["embed_dim"], broken=[""] * known["broken"])


def _compute(
    encoder: PretrainedEncoder,
    images: Images,
    unfinished: Unfinished,
    settings: Settings,
    save_every_s: float,
    stop: StopRequest | None,
) -> None:
    """Adds features until all images are done or a stop is asked for."""
    started = saved = time.monotonic()
    begun, waiting = unfinished.done, list[Features]()
    if begun == len(images):
        return
    with (
        progress(total=len(images), initial=begun, desc="embedding", unit=" images") as bar,
        closing(compute_features(encoder, images, settings, first=begun)) as batches,
    ):
        for batch in batches:
            waiting.append(batch)
            bar.update(batch.stop - batch.first)
            now, stopped = time.monotonic(), bool(stop)
            full = sum(one.features.nbytes for one in waiting) >= _MOST_BYTES_UNSAVED
            if stopped or full or now - saved >= max(save_every_s, _SHARE_OF_TIME * (now - started)):
                unfinished.add(waiting)
                waiting, saved = [], time.monotonic()
            if stopped:
                break
    if waiting:
        unfinished.add(waiting)


def _publish(
    outcome: Outcome, unfinished: Unfinished, images: Images, facts: dict[str, Any], out: Path
) -> Outcome:
    """Writes the output under another name, which then takes its place."""
    rows = unfinished.features()
    if not len(rows):
        unfinished.forget()
        raise InputError(f"no image of {images.name} can be read: {unfinished.broken[0][1]}")
    whole = np.delete(np.arange(len(images)), [image for image, _ in unfinished.broken])
    joined = unfinished.folder / f"joined{out.suffix}"
    write_output(joined, columns_of(rows, whole, images, facts))
    fsync_path(joined)
    broken = _write_broken(unfinished.broken, images, broken_path(out))
    os.replace(joined, out)
    fsync_path(out.parent)
    unfinished.forget()
    return replace(outcome, rows=len(rows), broken=broken)


def _write_broken(broken: list[tuple[int, str]], images: Images, path: Path) -> list[str]:
    """Writes the list of images that are passed over; returns its lines for people."""
    if not broken:
        path.unlink(missing_ok=True)
        return []
    numbers = np.array([image for image, _ in broken], np.int64)
    keys, paths = images.keys(numbers), [images.path(image) for image in numbers.tolist()]
    splits = [""] * len(broken)
    if images.splits:
        splits = [images.splits[number] for number in images.split_numbers(numbers)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("split", "key", "path", "reason"))
    reasons = [plain_text(reason) for _, reason in broken]
    writer.writerows(zip(splits, keys, paths, reasons, strict=True))
    write_atomically(path, stream.getvalue().encode())
    return [f"{where}: {reason}" for where, reason in zip(map(_named, keys, paths), reasons, strict=True)]


def _named(key: str, path: str) -> str:
    """A file, or a shard and a key in it."""
    return f"{path}, key {key}" if path.endswith(".tar") else path
