"""Embeds images into a folder; a call that was stopped or killed resumes.

`OUT.partial/features.npy` (N, D) has room for all images; its first rows are those of the images that can be read.
`OUT.partial/state.json` counts the images whose rows are on the disk; later ones are computed again. The folder
takes its name OUT when it is complete.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core.arrays import create_array
from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, replace_folder, write_json
from mae_vit.core.progress import progress
from mae_vit.runtime.locks import try_lock
from mae_vit.runtime.signals import StopRequest
from mae_vit.weights.embed import output
from mae_vit.weights.embed.features import Batch, Settings, compute_features
from mae_vit.weights.embed.images import Images
from mae_vit.weights.feature_encoder import FeatureEncoder

# A kill costs as much work.
SAVE_EVERY_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What a call did: of `total` images `begun` were done before it and `done` are now, `broken` ones among them.

    The output has `rows` rows of `width` numbers; None if a signal came before it was complete.
    """

    total: int
    begun: int
    done: int
    broken: int
    width: int
    rows: int | None = None
    wall_s: float = 0.0


@dataclass
class _State:
    """The images that are done: the first `done`, with number and reason of each `broken` one among them."""

    done: int
    broken: list[tuple[int, str]]


def embed(
    encoder: FeatureEncoder,
    images: Images,
    out: Path,
    settings: Settings,
    *,
    restart: bool = False,
    stop: StopRequest | None = None,
) -> Outcome:
    """Writes the features of all images that can be read to the folder `out` (see `output`).

    A call with the same arguments resumes from what is done and ends with the same bytes.

    Args:
        encoder: on the settings' device.
        images: of one source.
        out: the folder to be (see `output.check_out`).
        settings: device, batch size and workers may change between calls; the first two change the last bits
            of what is computed from then on.
        restart: begin again; an earlier output stays until the new one is complete.
        stop: asked after each batch.

    Raises:
        InputError: if another process writes `out`, if it or what is begun of it has other features, if the images
            have other bands than the encoder, or if no image can be read.
    """
    if images.dataset is not None:
        encoder.fit_bands(images.dataset.bands, images.name)
    meta = output.describe_features(encoder, images, settings)
    shape, dtype = (len(images), encoder.num_features), np.dtype(settings.dtype)
    total, width = shape
    with _locked(out) as folder:
        state_file, state = folder / output.STATE, _State(0, [])
        if restart:
            for path in {*folder.iterdir()} - {folder / output.LOCK}:
                path.unlink()
        if state_file.exists():
            saved = output.read_description(state_file, meta)
            state = _State(saved["done"], saved["broken"])
        elif (out / output.META).exists() and not restart:
            saved = output.read_description(out / output.META, meta)
            return Outcome(total, total, total, saved["broken"], width, saved["rows"])
        before, started = state.done, time.monotonic()
        if before < total:
            path = folder / output.FEATURES
            rows = np.lib.format.open_memmap(path, "r+") if before else create_array(path, dtype, shape)
            with closing(compute_features(encoder, images, settings, first=before)) as batches:
                for _ in _fill(rows, batches, state, stop):
                    rows.flush()
                    write_json(state_file, {**meta, "done": state.done, "broken": state.broken})
        wall_s = time.monotonic() - started
        written = _publish(folder, out, meta, state.broken, images) if state.done == total else None
        return Outcome(total, before, state.done, len(state.broken), width, written, wall_s)


def _fill(
    rows: np.memmap, batches: Generator[Batch, None, None], state: _State, stop: StopRequest | None
) -> Iterator[None]:
    """Adds rows until all images are done or a stop is asked for; yields when it is time to save."""
    saved = time.monotonic()
    with progress(total=len(rows), initial=state.done, desc="embedding", unit=" images") as bar:
        for last, features, broken in batches:
            bar.update(last - state.done)
            row = state.done - len(state.broken)
            rows[row : row + len(features)] = features
            state.done = last
            state.broken += broken
            stopped = bool(stop)
            if stopped or last == len(rows) or time.monotonic() - saved >= SAVE_EVERY_S:
                yield
                saved = time.monotonic()
            if stopped:
                return


def _publish(
    folder: Path, out: Path, meta: dict[str, Any], broken: list[tuple[int, str]], images: Images
) -> int:
    """Completes the folder, which then takes the place of `out`; returns its rows. A kill in between loses nothing."""
    if len(broken) == len(images):
        (folder / output.STATE).unlink()  # nothing to resume
        raise InputError(f"no image of {images.name} can be read: {broken[0][1]}")
    rows = output.write_output(folder, meta, broken, images)
    for path in folder.iterdir():
        fsync_path(path)
    replace_folder(folder, out)
    for name in (output.STATE, output.LOCK):
        (out / name).unlink()
    fsync_path(out.parent)
    return rows


@contextmanager
def _locked(out: Path) -> Iterator[Path]:
    """Locks the folder `OUT.partial`, which is made if need be, and goes where nothing is left to resume.

    Raises:
        InputError: if another process has it.
    """
    folder = out.with_name(f"{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / output.LOCK
    lock = try_lock(path)
    if lock is None:
        raise InputError(f"{out} is being written by {path.read_text() or 'another process'}: let it end")
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")
        yield folder
    finally:
        if not (folder / output.STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()
