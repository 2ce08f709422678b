"""Images as pictures: labeled rows; any bands in color, as three of them, one as gray, or principal components.

Shapes: B images, C bands, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import wrap
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import nearest


class Picture(NamedTuple):
    """One labeled row of a picture: images (B, C, H, W) in 0..1, and a tint (B, 4, H, W), RGB and opacity in 0..1."""

    label: str
    images: Tensor
    tint: Tensor | None = None


# Small images are shown at this many pixels at least.
_MIN_SHOWN_PX = 64
# Height of a line of a label, and an upper estimate of the mean width of its letters.
_LINE_PX, _LETTER_PX = 14, 6


@cache
def label_font() -> ImageFont.FreeTypeFont:
    """Opens a font for names in most scripts; Pillow's own has English letters only."""
    import matplotlib  # slow to import

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 10)


def draw_rows(rows: Sequence[Picture]) -> np.ndarray:
    """Draws one row for each picture, below its label: uint8 (height, width, 3)."""
    tiles = []
    for row in rows:
        images = row.images.detach().float().cpu()
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        zoom = max(1, -(-_MIN_SHOWN_PX // min(images.shape[2:])))
        images = F.pad(F.interpolate(images, scale_factor=zoom, mode="nearest"), (1, 1, 1, 1), value=1.0)
        strip = (torch.cat(list(images), dim=2).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        lines = wrap(row.label, max(1, strip.shape[1] // _LETTER_PX)) or [""]
        label = Image.new("RGB", (strip.shape[1], _LINE_PX * len(lines)), "white")
        for number, line in enumerate(lines):
            ImageDraw.Draw(label).text((2, 1 + _LINE_PX * number), line, fill="black", font=label_font())
        tiles += [np.asarray(label), strip]
    return np.concatenate(tiles)


# Names of bands in the order red, green, blue, in lower case: Sentinel-2's, Landsat's short form, plain words.
_NATURAL = (("b04", "b03", "b02"), ("b4", "b3", "b2"), ("red", "green", "blue"), ("r", "g", "b"))
# Components show this many standard deviations to either side of the mean.
_SPREAD = 2.5


@dataclass(frozen=True)
class Composite:
    """A linear map from bands to colors: weights @ (bands - center) + offset.

    Attributes:
        weights: (3, C), or (1, C) for gray.
        label: names the bands shown, with the raw values of black and white.
    """

    weights: Tensor
    center: Tensor
    offset: float
    label: str

    def __call__(self, images: Tensor) -> Tensor:
        """Maps images in 0..1 to colors in 0..1: (B, C, H, W) -> (B, 3 or 1, H, W)."""
        centered = images.float() - self.center.to(images.device)[:, None, None]
        colors = torch.einsum("kc,bchw->bkhw", self.weights.to(images.device), centered)
        return (colors + self.offset).clamp(0, 1)


def find_bands(wanted: Sequence[int | str], bands: Bands, channels: int) -> list[int]:
    """Returns the places of one or three bands, given by number, from 1, or by name; else raises InputError."""
    if len(wanted) not in (1, 3):
        raise InputError(
            f"picture bands {list(wanted)}: must be three, for red, green and blue, or one for gray"
        )
    names = bands.names or tuple(str(number + 1) for number in range(channels))
    places = []
    for one in wanted:
        if str(one) in names:
            places.append(names.index(str(one)))
        elif str(one).isdigit() and 1 <= int(one) <= channels:
            places.append(int(one) - 1)
        else:
            hint = nearest(str(one), names)
            raise InputError(f"no picture band {one}; give 1 to {channels} or a name ({hint})")
    return places


def compose(images: Tensor, bands: Bands, wanted: Sequence[int | str] | None = None) -> Composite:
    """Chooses the colors of images.

    Args:
        images: (B, C, H, W) in 0..1; principal components are computed from them.
        bands: names and scale.
        wanted: three bands or one, by number from 1 or by name. None takes bands with usual names of red, green and
            blue; else three bands as they are, the first of one or two, and principal components of more.
    """
    channels = images.shape[1]
    places = find_bands(wanted, bands, channels) if wanted else _natural(bands, channels)
    if places is None:
        return _principal(images)
    weights = torch.zeros(len(places), channels)
    weights[range(len(places)), places] = 1.0
    shown = ", ".join(_describe(place, bands) for place in places)
    as_what = " as red, green, blue" if len(places) == 3 else ""
    return Composite(weights, torch.zeros(channels), 0.0, shown + as_what)


def in_colors(
    rows: Sequence[Picture], bands: Bands, wanted: Sequence[int | str] | None = None
) -> list[Picture]:
    """Maps rows of pictures to colors, and lays their tints over them.

    The last row, the original, decides which colors; its label then names them. Gray and RGB stay as they are.
    """
    if not rows or (bands.photographs and not wanted):
        return [Picture(row.label, _tinted(row.images, row.tint)) for row in rows]
    colors = compose(rows[-1].images, bands, wanted)
    drawn = [Picture(row.label, _tinted(colors(row.images), row.tint)) for row in rows]
    return [*drawn[:-1], Picture(f"{rows[-1].label}: {colors.label}", drawn[-1].images)]


def _tinted(images: Tensor, tint: Tensor | None) -> Tensor:
    return images if tint is None else (1 - tint[:, 3:]) * images + tint[:, 3:] * tint[:, :3]


def _natural(bands: Bands, channels: int) -> list[int] | None:
    names = [name.lower() for name in bands.names]
    for three in _NATURAL:
        if set(three) <= set(names):
            return [names.index(name) for name in three]
    if channels <= 3:
        return [0, 1, 2] if channels == 3 else [0]
    return None


def _describe(place: int, bands: Bands) -> str:
    if bands.photographs:
        return f"band {place + 1}"
    return f"{bands.names[place]} {bands.low[place]:g}..{bands.high[place]:g}"


def _principal(images: Tensor) -> Composite:
    """Maps pixels to their first three principal components, each scaled by its spread, its largest weight positive."""
    pixels = images.float().clamp(0, 1).movedim(1, -1).flatten(0, 2).cpu().double()  # (B*H*W, C)
    center = pixels.mean(dim=0)
    centered = pixels - center
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(pixels))
    chosen = vectors[:, -3:].flip(1).T  # (3, C), the largest first
    spread = values[-3:].flip(0).clamp(min=1e-12).sqrt()
    signs = chosen.gather(1, chosen.abs().argmax(dim=1, keepdim=True)).sign()
    explained = float(values[-3:].sum() / values.sum().clamp(min=1e-12))
    return Composite(
        (chosen * signs / (2 * _SPREAD * spread[:, None])).float(),
        center.float(),
        0.5,
        f"principal components 1, 2, 3 of {images.shape[1]} bands as red, green, blue "
        f"({explained:.0%} of the variance)",
    )
