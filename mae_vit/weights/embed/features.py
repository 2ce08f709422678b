"""Features of images, batch by batch. Shapes: K decoded images, C channels, H W pixels, D width."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason, plain_text
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.prepare.entries import Entry
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.weights.embed.images import Images
from mae_vit.weights.feature_encoder import FeatureEncoder

Batch = tuple[int, np.ndarray, list[tuple[int, str]]]


@dataclass(frozen=True)
class Settings:
    """Settings of a computation: `workers` threads decode (0: the calling thread), bf16 uses autocast."""

    device: torch.device
    batch_size: int = 64
    workers: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    dtype: Literal["float32", "float16"] = "float32"


def compute_features(
    encoder: FeatureEncoder, images: Images, settings: Settings, *, first: int = 0
) -> Generator[Batch, None, None]:
    """Yields the features of all images from `first` on, in batches.

    A batch covers `batch_size` consecutive images, broken ones included, so calls that resume between batches
    give the same features to the last bit.

    Yields:
        Number after the batch's last image; features (K, D) in the settings' dtype; number and reason of each
        image that cannot be decoded.

    Raises:
        InputError: if features are not finite.
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
            worst = plain_text(images.entries[list(whole)[finite.argmin()]].path)
            or_wider = " or --dtype float32" if settings.dtype == "float16" else ""
            raise InputError(
                f"the features of {worst} are not finite: look at the weights, or try --precision fp32{or_wider}"
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
            return "takes more memory than there is"

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
