"""Embeds images into a file; a call that was stopped or killed resumes.

`OUT.parts/features.npy` (N, D) has room for all images; its first rows are those of the images that can be read.
`OUT.parts/state.json` is written after the rows. Rows that it does not count are computed again.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core.arrays import create_array
from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, write_json
from mae_vit.core.progress import progress
from mae_vit.runtime.locks import try_lock
from mae_vit.runtime.signals import StopRequest
from mae_vit.weights.embed import output
from mae_vit.weights.embed.features import Batch, Settings, compute_features
from mae_vit.weights.embed.images import Images
from mae_vit.weights.feature_encoder import FeatureEncoder

SAVE_EVERY_S = 5.0
# 1 had a file for each part of the features.
_FORMAT = 2
_STATE, _FEATURES = "state.json", "features.npy"


@dataclass(frozen=True)
class Outcome:
    """What a call did: of `total` images `begun` were done before it and `done` are now, `broken` ones among them.

    The output has `rows` rows of `width` numbers; None if a signal came before it was written.
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
    """What is done: `done` images from the first on, and number and reason of each `broken` one among them."""

    identity: dict[str, Any]
    done: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)
    format: int = _FORMAT


def embed(
    encoder: FeatureEncoder,
    images: Images,
    out: Path,
    settings: Settings,
    *,
    restart: bool = False,
    save_every_s: float = SAVE_EVERY_S,
    stop: StopRequest | None = None,
) -> Outcome:
    """Writes the features of all images that can be read to `out`, and `OUT.broken.csv` of the others.

    A call with the same arguments resumes from what is done and ends with the same bytes.

    Args:
        encoder: on the settings' device.
        images: of one source.
        out: a .npz or .parquet file (see `check_out`).
        settings: device, batch size and workers may change between calls; the first two change the last bits
            of what is computed from then on.
        restart: begin again; an earlier output stays until the new one is whole.
        save_every_s: how much work a kill may cost.
        stop: asked after each batch.

    Raises:
        InputError: if another process writes `out`, if it or its parts hold other features, if the images have
            other bands than the encoder, or if no image can be read.
    """
    if images.dataset is not None:
        encoder.fit_bands(images.dataset.bands, images.name)
    metadata, total, width = (
        output.make_metadata(encoder, images, settings),
        len(images),
        encoder.num_features,
    )
    with locked_parts(out) as folder:
        state = None if restart else _read_state(folder)
        if state is not None:
            output.check_same_features(state.identity, metadata, where=folder)
        elif out.exists() and not restart:
            saved = output.read_metadata(out)
            output.check_same_features(saved, metadata, where=out)
            return Outcome(total, total, total, saved["broken"], width, saved["rows"])
        state = state or _State(metadata)
        begun, started = state.done, time.monotonic()
        rows = _open_rows(folder, state, (total, width), np.dtype(settings.dtype))
        if begun < total:
            with closing(compute_features(encoder, images, settings, first=begun)) as batches:
                _fill(rows, batches, state, folder / _STATE, save_every_s, stop)
        wall_s = time.monotonic() - started
        written = _publish(rows, state, images, metadata, out) if state.done == total else None
        return Outcome(total, begun, state.done, len(state.broken), width, written, wall_s)


@contextmanager
def locked_parts(out: Path) -> Iterator[Path]:
    """Locks the folder `OUT.parts`, which is made if need be, and goes where nothing is left to resume.

    Raises:
        InputError: if another process has it.
    """
    folder = out.with_name(f"{out.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    lock = try_lock(path)
    if lock is None:
        raise InputError(f"{out} is being written by {path.read_text() or 'another process'}: let it end")
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")
        yield folder
    finally:
        if not (folder / _STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _read_state(folder: Path) -> _State | None:
    """Returns None where nothing is done; what is not understood is of no known features."""
    try:
        state = _State(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return _State({})
    return state if state.format == _FORMAT else _State({})


def _open_rows(folder: Path, state: _State, shape: tuple[int, int], dtype: np.dtype) -> np.memmap:
    """Opens the array of what is done, or an empty one."""
    path = folder / _FEATURES
    if not state.done:
        (folder / _STATE).unlink(missing_ok=True)  # of other features
        rows = create_array(path, dtype, shape)
        write_json(folder / _STATE, asdict(state))
        return rows
    try:
        # To read refuses a file that was cut short, which "r+" would fill with zeros.
        np.load(path, mmap_mode="r")
        rows = np.lib.format.open_memmap(path, "r+")
        if (rows.shape, rows.dtype) != (shape, dtype):
            raise ValueError("it has another size")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}): --restart begins again") from None
    return rows


def _fill(
    rows: np.memmap,
    batches: Iterable[Batch],
    state: _State,
    path: Path,
    save_every_s: float,
    stop: StopRequest | None,
) -> None:
    """Adds rows until all images are done or a stop is asked for; `path` counts those that are on the disk."""
    saved, stopped = time.monotonic(), False
    with progress(total=len(rows), initial=state.done, desc="embedding", unit=" images") as bar:
        for last, features, broken in batches:
            bar.update(last - state.done)
            row = state.done - len(state.broken)
            rows[row : row + len(features)] = features
            state.done = last
            state.broken += broken
            stopped = bool(stop)
            if stopped or last == len(rows) or time.monotonic() - saved >= save_every_s:
                rows.flush()
                write_json(path, asdict(state))
                saved = time.monotonic()
            if stopped:
                return


def _publish(rows: np.memmap, state: _State, images: Images, metadata: dict[str, Any], out: Path) -> int:
    """Writes the output under another name, which then takes its place; returns its rows."""
    folder = Path(str(rows.filename)).parent
    features = rows[: state.done - len(state.broken)]
    if len(features):
        partial = folder / f"joined{out.suffix}"
        output.write_output(partial, output.columns_of(features, state.broken, images, metadata))
        fsync_path(partial)
        output.write_broken(out, state.broken, images)
        os.replace(partial, out)
        fsync_path(out.parent)
    (folder / _STATE).unlink()
    if not len(features):
        raise InputError(f"no image of {images.name} can be read: {state.broken[0][1]}")
    return len(features)
