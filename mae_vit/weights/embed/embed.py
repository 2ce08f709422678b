"""Embeds images into a file; a call that was stopped or killed resumes."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path
from mae_vit.core.progress import progress
from mae_vit.runtime.signals import StopRequest
from mae_vit.weights.embed.features import Settings, compute_features
from mae_vit.weights.embed.identity import check_same_features, make_facts
from mae_vit.weights.embed.images import Images
from mae_vit.weights.embed.output import columns_of, read_facts, write_broken, write_output
from mae_vit.weights.embed.unfinished import Unfinished
from mae_vit.weights.encoder import PretrainedEncoder

SAVE_EVERY_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    Attributes:
        total: images of the source.
        begun: images that were done before it.
        done: images that are done now, broken ones among them.
        broken: images that cannot be read.
        width: D.
        rows: of the output; None if a signal came before it was written.
        wall_s: seconds of computing.
    """

    total: int
    begun: int
    done: int
    broken: int
    width: int
    rows: int | None = None
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
        out: a .npz or .parquet file (`mae_vit.weights.embed.output.check_out`).
        settings: of the computation. Device, batch size and workers may change between calls;
            the first two change the last bits of what is computed from then on.
        restart: begin again; an earlier output stays until the new one is whole.
        save_every_s: how much work a kill may cost.
        stop: asked after each batch.

    Raises:
        InputError: if another process writes `out`, if it or its parts hold other features, or if no image
            can be read.
    """
    facts, total = make_facts(encoder, images, settings), len(images)
    unfinished = Unfinished(out)
    try:
        if not restart and unfinished.identity is not None:
            check_same_features(unfinished.identity, facts, where=unfinished.folder)
        elif not restart and out.exists():
            saved = read_facts(out)
            check_same_features(saved, facts, where=out)
            return Outcome(total, total, total, saved["broken"], saved["embed_dim"], saved["rows"])
        shape = (total, encoder.embed_dim)
        unfinished.open(facts, shape, settings.dtype, resume=not restart)
        begun, started = unfinished.done, time.monotonic()
        if begun < total:
            _compute(encoder, images, unfinished, settings, save_every_s, stop)
        wall_s, done = time.monotonic() - started, unfinished.done
        rows = _publish(unfinished, images, facts, out) if done == total else None
        return Outcome(total, begun, done, len(unfinished.broken), encoder.embed_dim, rows, wall_s)
    finally:
        unfinished.release()


def _compute(
    encoder: PretrainedEncoder,
    images: Images,
    unfinished: Unfinished,
    settings: Settings,
    save_every_s: float,
    stop: StopRequest | None,
) -> None:
    """Adds features until all images are done or a stop is asked for."""
    begun, saved = unfinished.done, time.monotonic()
    with (
        progress(total=len(images), initial=begun, desc="embedding", unit=" images") as bar,
        closing(compute_features(encoder, images, settings, first=begun)) as batches,
    ):
        for batch in batches:
            bar.update(batch.stop - unfinished.done)
            unfinished.add(batch)
            stopped = bool(stop)
            if stopped or time.monotonic() - saved >= save_every_s:
                unfinished.save()
                saved = time.monotonic()
            if stopped:
                return
    unfinished.save()


def _publish(unfinished: Unfinished, images: Images, facts: dict[str, object], out: Path) -> int:
    """Writes the output under another name, which then takes its place; returns its rows."""
    features = unfinished.features()
    if not len(features):
        unfinished.forget()
        raise InputError(f"no image of {images.name} can be read: {unfinished.broken[0][1]}")
    joined = unfinished.folder / f"joined{out.suffix}"
    write_output(joined, columns_of(features, unfinished.broken, images, facts))
    fsync_path(joined)
    write_broken(out, unfinished.broken, images)
    os.replace(joined, out)
    fsync_path(out.parent)
    unfinished.forget()
    return len(features)
