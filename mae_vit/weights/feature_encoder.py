"""The interface of encoders, ours and third-party, to kNN, few-shot, probes and `mae-vit embed`.

Shapes: B batch, C channels, H W pixels, D width of a feature, D_map width of a patch's token.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import expand_path
from mae_vit.data.images.augment import Interpolation, center_crop
from mae_vit.data.images.decode import DecodeError, jpeg_size, read_header
from mae_vit.data.images.preprocess import preprocess, preprocess_opened, shape_bands
from mae_vit.models.attention import choose_attention

# Largest 8-bit value of 16-bit images that hold only 12 bits, plus one.
_DARK = 16
ImageLike = str | Path | bytes | Image.Image | np.ndarray | Tensor


@dataclass(frozen=True)
class ImageInput:
    """The images that an encoder takes.

    Attributes:
        img_size: (H, W) in pixels.
        in_chans: C.
        mean: mean of each channel, for pixels in 0..1.
        std: standard deviation of each channel, for pixels in 0..1.
        interpolation: method of resizing to `img_size`.
        bands: meaning of raw values.
        preprocessing: earlier changes to the images.
    """

    img_size: tuple[int, int]
    in_chans: int
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: Interpolation = "bicubic"
    bands: Bands = RGB8
    preprocessing: Preprocessing = UNCHANGED


class FeatureEncoder(nn.Module):
    """An encoder whose features are evaluated or stored, not trained.

    Attributes:
        input: the images that it takes.
        num_features: D.
        origin: who trained a third-party encoder; None for encoders of mae-vit.
    """

    input: ImageInput
    num_features: int
    origin: str | None = None
    _warned: frozenset[str] = frozenset()

    def __init__(self, images: ImageInput) -> None:
        """Takes the description of its images."""
        super().__init__()
        self.input = images

    @property
    def embed_dim(self) -> int:
        """D, the width of the features."""
        return self.num_features

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """Encodes and pools normalized images: float32 (B, C, H, W) -> (B, D)."""

    @abstractmethod
    def patch_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images, without pooling and prefix tokens, with the final norm.

        (B, C, H, W) -> (B, D_map, rows, columns).
        """

    def description(self) -> dict[str, Any]:
        """Returns the facts, as JSON, that determine the features; pretrained encoders add those on their weights."""
        return {
            "img_size": list(self.input.img_size),
            "embed_dim": self.num_features,
            "mean": list(self.input.mean),
            "std": list(self.input.std),
        }

    def place(self, device: torch.device) -> None:
        """Moves the encoder to a device, in evaluation mode; ours takes the attention that is faster there."""
        if self.origin is None:
            choose_attention(self, device)
        self.to(device).eval()

    def forward(self, images: Tensor) -> Tensor:
        """Encodes normalized images from `transform`: float32 (B, C, H, W) -> (B, D).

        Raises ValueError for images of another shape, or of an integer type.
        """
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise ValueError("images must be float32 (B, C, H, W), as this encoder's transform makes them")
        wanted = (self.input.in_chans, *self.input.img_size)
        if images.shape[1:] != wanted:
            raise ValueError(
                f"images of {tuple(images.shape)} do not fit; this encoder needs (B, {', '.join(map(str, wanted))}), "
                "as its transform makes them (load_encoder(..., img_size=...) interpolates its positions)"
            )
        return self.features(images)

    def transform(self, image: ImageLike) -> Tensor:
        """Prepares one image: the changes of `prepare`, then crop, resizing and normalization.

        It crops the largest centered box of the encoder's aspect ratio, resizes it (antialiased)
        and normalizes it. Fine-tuning evaluates on the same view.

        Args:
            image: a path, the bytes of an image file, a PIL image, a uint8 array (H, W, 3) or (H, W), or a uint8
                tensor (3, H, W). An encoder of other bands takes a file, or raw values (C, H, W) of its bands and type.

        Returns:
            float32 (C, H, W).

        Raises:
            InputError: if the image cannot be read or decoded, or is none of these.
        """
        pixels = np.require(self.crop(image), requirements="W")  # pixels from a file may be read-only
        return self.normalize(torch.from_numpy(pixels)[None])[0]

    def crop(self, image: ImageLike) -> np.ndarray:
        """Does the same as `transform` without normalization: returns raw values (C, H, W)."""
        return self.crop_pixels(self.read(image))

    def read(self, image: ImageLike) -> np.ndarray:
        """Reads an image as `transform` does, but does not crop it: returns raw values (C, any size).

        Raises InputError if it cannot be read or decoded, or is none.
        """
        try:
            if isinstance(image, str) and is_url(image):
                raise InputError(f"{redact_url(image)} is remote; download it first")
            data = expand_path(image).read_bytes() if isinstance(image, str | Path) else image
            return self.decode(data) if isinstance(data, bytes) else self._opened(data)
        except OSError as error:
            raise InputError(f"cannot read {image!s}: {error_reason(error)}") from None
        except DecodeError as error:
            named = str(image) if isinstance(image, str | Path) else "the image"
            raise InputError(f"{named} cannot be decoded: {error}") from None

    def decode(self, data: bytes) -> np.ndarray:
        """Decodes an image file, and changes it as `prepare` changed the training images: (C, H, W).

        Raises DecodeError if it is damaged, or has other bands.
        """
        wanted = self.input
        pixels = preprocess(data, wanted.in_chans, wanted.preprocessing, wanted.bands)
        if wanted.bands.photographs and jpeg_size(data) is None:
            with suppress(DecodeError):  # arrays have no header
                if any("16 bits" in note for note in read_header(data).notes):
                    self._warn_deep(pixels)
        return pixels

    def _warn_deep(self, pixels: np.ndarray) -> None:
        """Warns once about 16-bit images, and once about dark ones, whose scale is unknown."""
        warning = "images of 16 bits are read as their upper 8"
        if pixels.max(initial=0) < _DARK:
            warning += ", so 12-bit values look black; stretch them to 0..65535 first"
        if warning not in self._warned:
            self._warned |= {warning}
            print(f"warning: {warning}", file=sys.stderr)

    def _opened(self, image: Image.Image | np.ndarray | Tensor) -> np.ndarray:
        """Does the same as `decode` for pixels in memory."""
        wanted = self.input
        if not wanted.bands.photographs:
            return shape_bands(_raw_values(image, wanted.bands), wanted.preprocessing, wanted.bands.nodata)
        photograph = _photograph(image)
        if photograph.mode == "I" and photograph.format is None:
            # In an image from a file, mode "I" means 16 bits.
            raise DecodeError('pixels of mode "I" have no known range unless they come from a file')
        pixels = preprocess_opened(photograph, wanted.in_chans, wanted.preprocessing)
        if photograph.mode.startswith("I"):
            self._warn_deep(pixels)
        return np.ascontiguousarray(pixels)

    def crop_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Crops and resizes a decoded image like `transform`: raw values (C, any size) -> (C, H, W)."""
        return center_crop(pixels, self.input.img_size, self.input.bands, self.input.interpolation)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalizes raw images for the encoder: (B, C, H, W) -> float32; missing values become 0."""
        mean, std = (
            torch.tensor(list(values), dtype=torch.float32, device=images.device).view(-1, 1, 1)
            for values in (self.input.mean, self.input.std)
        )
        bands = self.input.bands
        normalized, valid = bands.unit(images).sub_(mean).div_(std), bands.valid(images)
        return normalized if valid is None else normalized.masked_fill_(~valid, 0.0)

    def fit_bands(self, bands: Bands, where: str) -> None:
        """Switches to prepared data, whose bands are already chosen; see the function `fit_bands`.

        Raises InputError if the data have other bands than the encoder.
        """
        fitted = fit_bands(self.input.bands, bands, where)
        self.input = replace(self.input, bands=fitted, preprocessing=self.input.preprocessing.of_prepared)


def fit_bands(theirs: Bands, bands: Bands, where: str) -> Bands:
    """Returns the bands with which an encoder of bands `theirs` reads data: its own scale, and the data's `nodata`.

    If the data have no `nodata`, the encoder's own remains. Raises InputError if the data have another number or type
    of bands than the encoder.
    """
    if (len(theirs.names), theirs.dtype) != (len(bands.names), bands.dtype):
        data, ours = (
            "8-bit gray or RGB" if each.photographs else f"{len(each.names)} bands of {each.dtype}"
            for each in (bands, theirs)
        )
        raise InputError(
            f"{where} has images of {data}, but the encoder needs {ours}; fine-tune it, which adapts its patch "
            "projection"
        )
    return replace(theirs, nodata=theirs.nodata if bands.nodata is None else bands.nodata)


def _raw_values(image: object, bands: Bands) -> np.ndarray:
    """Returns raw values (C, H, W)."""
    count, values = len(bands.names), image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if (
        not isinstance(values, np.ndarray)
        or (values.dtype, values.ndim) != (bands.dtype, 3)
        or len(values) != count
        or not values.size
    ):
        raise _wrong_image(image, f"an array or tensor {bands.dtype} ({count}, H, W) of raw values")
    return values


def _photograph(image: object) -> Image.Image:
    """Converts 8-bit gray or RGB to a PIL image."""
    if isinstance(image, Image.Image):
        try:
            image.load()
        except (ValueError, AssertionError):
            raise InputError("the PIL image was closed before it was read; load it first") from None
        return image
    pixels = image
    if isinstance(image, Tensor) and image.ndim == 3 and len(image) in (1, 3):
        pixels = image.detach().cpu().permute(1, 2, 0).squeeze(-1).numpy()
    # The 4th value of a color is its transparency, which is dropped as in files.
    if (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.size
        and (pixels.ndim == 2 or pixels.shape[2:] in ((3,), (4,)))
    ):
        return Image.fromarray(pixels)
    raise _wrong_image(image, "a PIL image, a uint8 array (H, W, 3) or (H, W), or a uint8 tensor (3, H, W)")


def _wrong_image(image: object, forms: str) -> InputError:
    kind = f"of type {type(image).__name__}"
    if isinstance(image, np.ndarray | Tensor):
        kind = f"{str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}"
    return InputError(f"images must be a path, the bytes of a file, or {forms}, not {kind}")
