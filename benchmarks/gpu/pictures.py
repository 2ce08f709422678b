"""Images to load, made on the spot by many processes: noise with the spectrum of photographs.

The amplitude of photographs falls as the frequency rises (1/f; Field, J. Opt. Soc. Am. A 4, 1987), so
that JPEG has as much to code in such noise as in them: 500 x 375 at quality 90 takes some 110 KB.
"""

from __future__ import annotations

import io
import multiprocessing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from mae_vit.runtime.cores import cores_of_rank

_CLASSES = 10
_CHUNK = 16


@dataclass(frozen=True)
class Kind:
    """What images are made.

    Attributes:
        count: of images.
        width: in pixels.
        height: in pixels.
        suffix: "jpg" or "png".
    """

    count: int
    width: int
    height: int
    suffix: str


def make_images(folder: Path, kind: Kind) -> int:
    """Writes images into class folders below `folder`, by all cores; returns their bytes.

    A number makes the same image wherever it is drawn.
    """
    for label in range(_CLASSES):
        (folder / "train" / str(label)).mkdir(parents=True, exist_ok=True)
    write = partial(_write, folder, kind)
    cores = min(cores_of_rank(), kind.count // _CHUNK)
    if cores <= 1:
        return sum(map(write, range(kind.count)))
    pool = multiprocessing.get_context("spawn").Pool(cores)
    made = sum(pool.imap_unordered(write, range(kind.count), chunksize=_CHUNK))
    # Not as a context, which ends workers by a signal: a process that has trained ignores it, and so do they.
    pool.close()
    pool.join()
    return made


def _write(folder: Path, kind: Kind, number: int) -> int:
    buffer = io.BytesIO()
    image = Image.fromarray(draw(number, kind.height, kind.width))
    image.save(buffer, "JPEG" if kind.suffix == "jpg" else "PNG", quality=90, compress_level=1)
    path = folder / "train" / str(number % _CLASSES) / f"{number:06d}.{kind.suffix}"
    return path.write_bytes(buffer.getvalue())


def draw(number: int, height: int, width: int) -> np.ndarray:
    """Draws an image: uint8 (H, W, 3), a gradient of color below noise of falling amplitude."""
    random = np.random.default_rng(number)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf  # no mean of its own
    noise = random.standard_normal((3, height, width), np.float32)
    spectrum = np.fft.rfft2(noise) / frequency
    layers = np.fft.irfft2(spectrum, s=(height, width))
    # Colors of photographs go together: most of the detail is in brightness.
    layers = layers[:1] + 0.3 * layers
    layers *= 45 / layers.std()
    down, across = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None, :]
    slopes = random.uniform(-40, 40, (3, 2, 1, 1))
    pixels = 120 + layers + slopes[:, 0] * down + slopes[:, 1] * across
    return pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
