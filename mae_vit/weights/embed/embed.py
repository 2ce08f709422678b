"""Embeds images into a folder; resumes a call that was stopped or killed.

`OUT.partial/features.npy` (N, D) has room for all images; rows are filled from the first on, by readable images only.
`OUT.partial/state.json` counts the images that are done and on disk; later ones are computed again. The complete
folder is renamed to OUT.

Then `features.npy` has K rows, one for each readable image. `keys.txt`, `paths.txt` (of images that are not prepared),
`splits.txt` and `labels.npy` (int32, -1 = none; both if there are any) have an entry for each row. `meta.json`
describes the features and names the classes. `broken.csv` lists the other images.

Shapes: K decoded images, C channels, H W pixels, D width.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mae_vit.core import __version__
from mae_vit.core.arrays import create_array, keep_rows
from mae_vit.core.errors import InputError
from mae_vit.core.files import check_not_current, fsync_path, replace_folder, write_json
from mae_vit.core.messages import error_reason, plain_text
from mae_vit.core.progress import progress
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.prepare.entries import Entry
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.runtime.locks import try_lock
from mae_vit.runtime.signals import StopRequest
from mae_vit.weights.embed.images import Images
from mae_vit.weights.feature_encoder import FeatureEncoder

# A kill loses at most this much work.
SAVE_EVERY_S = 5.0
FEATURES, KEYS, META, BROKEN = "features.npy", "keys.txt", "meta.json", "broken.csv"
# Files of an incomplete folder.
_STATE, _LOCK = "state.json", ".lock"
_FILES = {FEATURES, KEYS, META, BROKEN, "paths.txt", "splits.txt", "labels.npy", _STATE, _LOCK}


@dataclass(frozen=True)
class Settings:
    """Settings of a computation: `workers` threads decode (0: the calling thread), bf16 uses autocast."""

    device: torch.device
    batch_size: int = 64
    workers: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    dtype: Literal["float32", "float16"] = "float32"


@dataclass(frozen=True)
class Outcome:
    """The result of a call: of `total` images, `begun` were done before and `done` are now, including `broken` ones.

    The output has `rows` rows of `width` numbers; `rows` is None if a signal stopped the call.
    """

    total: int
    begun: int
    done: int
    broken: int
    width: int
    rows: int | None = None
    wall_s: float = 0.0


def check_out(out: Path) -> None:
    """Raises InputError if `out` is a file or a file's name, or it or its partial folder holds something else."""
    check_not_current(out)
    if out.suffix in (".npy", ".npz", ".parquet"):
        raise InputError(f"--out {out}: the output is a folder; give {out.with_suffix('')}")
    for folder, needed in ((out, {META}), (_partial(out), set())):
        if not folder.exists():
            continue
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
        names = {name for name in names if not (name.startswith(".") and name.endswith(".tmp"))}
        if names and not needed <= names <= _FILES:
            other = min(names - _FILES, default=f"no {META}")
            raise InputError(f"{folder} is not from mae-vit embed (it contains {other}); give another --out")


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def embed(
    encoder: FeatureEncoder,
    images: Images,
    out: Path,
    settings: Settings,
    *,
    stop: StopRequest | None = None,
) -> Outcome:
    """Writes the features of all readable images to the new folder `out` (see `check_out`).

    A call with the same arguments resumes and ends with the same bytes. Device, batch size and workers may change
    between calls; the first two change the last bits of later features. `stop` is checked after each batch. Raises
    InputError if another process writes `out`, if its (partial) output has other features, if the images have other
    bands than the encoder, or if no image can be read.
    """
    if images.dataset is not None:
        encoder.fit_bands(images.dataset.bands, images.name)
    meta = _describe(encoder, images, settings)
    total, width = len(images), encoder.num_features
    with _locked(out) as folder:
        state: dict[str, Any] = {"done": 0, "broken": []}
        if (folder / _STATE).exists():
            state = _read_description(folder / _STATE, meta)
        elif (out / META).exists():
            saved = _read_description(out / META, meta)
            return Outcome(total, total, total, saved["broken"], width, saved["rows"])
        before, started = state["done"], time.monotonic()
        done, broken = _compute(encoder, images, settings, folder, meta, state, stop)
        wall_s = time.monotonic() - started
        rows = _publish(folder, out, meta, broken, images) if done == total else None
        return Outcome(total, before, done, len(broken), width, rows, wall_s)


def _compute(
    encoder: FeatureEncoder,
    images: Images,
    settings: Settings,
    folder: Path,
    meta: dict[str, Any],
    state: dict[str, Any],
    stop: StopRequest | None,
) -> tuple[int, list[tuple[int, str]]]:
    """Adds rows until all images are done or a stop is requested.

    Returns the number of images done, and number and reason of each broken image among them.
    """
    done, broken, total = state["done"], [tuple(pair) for pair in state["broken"]], len(images)
    if done == total:
        return done, broken
    path = folder / FEATURES
    if not done:
        create_array(path, np.dtype(settings.dtype), (total, encoder.num_features))
    rows = np.lib.format.open_memmap(path, "r+")
    saved, stopped = time.monotonic(), False
    with (
        progress(total=total, initial=done, desc="embedding", unit=" images") as bar,
        closing(compute_features(encoder, images, settings, first=done)) as batches,
    ):
        for last, features, failed in batches:
            bar.update(last - done)
            row = done - len(broken)
            rows[row : row + len(features)] = features
            done, broken, stopped = last, broken + failed, bool(stop)
            if stopped or done == total or time.monotonic() - saved >= SAVE_EVERY_S:
                rows.flush()
                write_json(folder / _STATE, {**meta, "done": done, "broken": broken})
                saved = time.monotonic()
            if stopped:
                break
    return done, broken


def _describe(encoder: FeatureEncoder, images: Images, settings: Settings) -> dict[str, Any]:
    """Describes encoder, images and settings as JSON. Equal descriptions mean equal features."""
    return {
        "tool": f"mae-vit {__version__}",
        **encoder.description(),
        "precision": settings.precision,
        "dtype": settings.dtype,
        "data": images.name,
        "data_images": len(images),
        "data_fingerprint": images.fingerprint,
        "labels": bool((images.labels >= 0).any()),
        **encoder.input.bands.to_entry(),
        **encoder.input.preprocessing.to_entry(),
    }


def _read_description(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Reads `meta.json` or `state.json`; raises InputError if it is damaged or differs from `asked`."""
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{path} is damaged; delete {path.parent}") from None
    differing = [key for key in asked if key != "tool" and saved.get(key) != asked[key]]
    if "digest" not in differing:  # the same weights by another path
        differing = [key for key in differing if key != "start"]
    if differing:
        options = [key for key in differing if not key.startswith("data_")]
        reasons = ["of other images"] * (len(options) < len(differing))
        reasons += [f"{key} was {saved.get(key)}, now {asked[key]}" for key in options]
        raise InputError(
            f"{path.parent} has other features ({', '.join(reasons)}); delete it, or give another --out"
        )
    return saved


def _publish(
    folder: Path, out: Path, meta: dict[str, Any], broken: list[tuple[int, str]], images: Images
) -> int:
    """Completes the folder and moves it to `out`; returns the number of rows. A kill in between loses nothing."""
    if len(broken) == len(images):
        (folder / _STATE).unlink()  # nothing to resume
        raise InputError(f"no image of {images.name} can be read ({broken[0][1]}); give other images")
    readable = np.delete(np.arange(len(images)), [number for number, _ in broken])
    keep_rows(folder / FEATURES, len(readable))
    entries = [images.entries[number] for number in readable.tolist()]
    lines = {KEYS: [plain_text(entry.key) for entry in entries]}
    if images.dataset is None:  # keys do not identify files: IMG_1.png beside IMG_1.jpg has the key IMG_1_2
        lines["paths.txt"] = [plain_text(entry.path) for entry in entries]
    if images.splits:
        lines["splits.txt"] = [entry.split for entry in entries]
    for name, values in lines.items():
        (folder / name).write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
    if meta["labels"]:
        np.save(folder / "labels.npy", images.labels[readable])
    images.write_broken(folder / BROKEN, broken)
    classes = list(images.classes) if meta["labels"] else []
    write_json(folder / META, {**meta, "rows": len(readable), "broken": len(broken), "classes": classes})
    for path in folder.iterdir():
        fsync_path(path)
    replace_folder(folder, out)
    for name in (_STATE, _LOCK):
        (out / name).unlink()
    fsync_path(out.parent)
    return len(readable)


@contextmanager
def _locked(out: Path) -> Iterator[Path]:
    """Creates and locks the folder `OUT.partial`; removes it in the end if there is nothing to resume.

    Raises InputError if another process has the lock.
    """
    folder = _partial(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    lock = try_lock(path)
    if lock is None:
        raise InputError(f"{out} is in use by {path.read_text() or 'another process'}; wait until it ends")
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield folder
    finally:
        if not (folder / _STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def compute_features(
    encoder: FeatureEncoder, images: Images, settings: Settings, *, first: int = 0
) -> Generator[tuple[int, np.ndarray, list[tuple[int, str]]], None, None]:
    """Yields the features of all images from `first` on, in batches of `batch_size` consecutive images.

    Broken images count, so calls that resume between batches give the same features to the last bit. Yields the number
    after the batch's last image; features (K, D) in the settings' dtype; number and reason of each image that cannot be
    decoded. Raises InputError if features are not finite.
    """
    crops = _crops(encoder, images.entries[first:], settings)
    for start in range(first, len(images), settings.batch_size):
        stop = min(start + settings.batch_size, len(images))
        batch = {image: next(crops) for image in range(start, stop)}
        whole = {image: crop for image, crop in batch.items() if not isinstance(crop, str)}
        # While a GPU computes, the threads decode the next images.
        features = _encode(encoder, list(whole.values()), settings)
        with np.errstate(over="ignore"):  # reported below
            rows = features.cpu().numpy().astype(settings.dtype)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            entry = images.entries[list(whole)[finite.argmin()]]
            worst = plain_text(f"{entry.path} ({entry.key})" if entry.path.endswith(".tar") else entry.path)
            or_wider = " or --dtype float32" if settings.dtype == "float16" else ""
            raise InputError(
                f"the features of {worst} are not finite; try --precision fp32{or_wider}, or other weights"
            )
        yield stop, rows, [(image, crop) for image, crop in batch.items() if isinstance(crop, str)]


def _crops(
    encoder: FeatureEncoder, entries: Sequence[Entry], settings: Settings
) -> Iterator[np.ndarray | str]:
    """Yields crops as `FeatureEncoder.crop` does, in order: raw values (C, H, W), or why an image is broken."""
    reading = Lock()

    def crop(entry: Entry) -> np.ndarray | str:
        try:
            with reading:  # open files of archives and shards are shared
                data = entry.read()
            return encoder.crop_pixels(encoder.decode(data))
        except OSError as error:
            return error_reason(error)
        except (ReadError, DecodeError) as error:
            return str(error)
        except MemoryError:
            return "needs more memory than there is"

    if not settings.workers:
        yield from map(crop, entries)
        return
    # Threads: the decoders and the resizing release the GIL.
    pool, pending = ThreadPoolExecutor(settings.workers), deque[Future[np.ndarray | str]]()
    try:
        for entry in entries:
            pending.append(pool.submit(crop, entry))
            if len(pending) > 2 * max(settings.batch_size, settings.workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@torch.inference_mode()
def _encode(encoder: FeatureEncoder, crops: list[np.ndarray], settings: Settings) -> Tensor:
    """Encodes crops (C, H, W): float32 (K, D) on the device."""
    if not crops:
        return torch.zeros(0, encoder.num_features, device=settings.device)
    pixels = torch.from_numpy(np.stack(crops)).to(settings.device)  # (K, C, H, W)
    enabled = settings.precision == "bf16"
    with torch.autocast(settings.device.type, dtype=torch.bfloat16, enabled=enabled):
        features = encoder(encoder.normalize(pixels))
    return features.float()
