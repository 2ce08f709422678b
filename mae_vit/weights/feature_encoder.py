"""What kNN, few-shot, probes and `mae-vit embed` need of an encoder: ours and those of others have it.

Shapes: B batch, C channels, H W pixels, D width of a feature, D_map width of a patch's token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.data.images.augment import Interpolation, center_crop
from mae_vit.data.images.decode import DecodeError, decode, pixels_of
from mae_vit.weights.other_bands import fit_bands

ImageLike = str | Path | bytes | Image.Image | np.ndarray


@dataclass(frozen=True)
class ImageInput:
    """The images that an encoder takes.

    Attributes:
        img_size: (H, W) in pixels.
        in_chans: C.
        mean: per-channel mean of the pixels (in 0..1).
        std: per-channel standard deviation of these pixels.
        interpolation: resizes images to `img_size`.
        bands: what raw values mean; None for 8-bit gray or RGB.
    """

    img_size: tuple[int, int]
    in_chans: int
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: Interpolation = "bicubic"
    bands: Bands | None = None


class FeatureEncoder(nn.Module):
    """An encoder whose features are measured or stored. Nothing trains it.

    Attributes:
        input: the images that it takes.
        num_features: D.
        num_prefix_tokens: tokens before those of the patches, such as [CLS] and registers.
        origin: who trained it, if others did; None for encoders of mae-vit.
    """

    input: ImageInput
    num_features: int
    num_prefix_tokens: int
    origin: str | None = None

    def __init__(self, images: ImageInput) -> None:
        """Holds what the encoder takes."""
        super().__init__()
        self.input = images

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """Encodes and pools normalized images: float32 (B, C, H, W) -> (B, D)."""

    @abstractmethod
    def patch_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images, without pooling: (B, C, H, W) -> (B, D_map, rows, columns).

        Prefix tokens are left out. The final norm is applied.
        """

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Returns JSON facts that determine the features: source, digest, sizes, normalization."""

    def place(self, device: torch.device) -> None:
        """Moves the encoder to a device, in evaluation mode."""
        self.to(device).eval()

    def forward(self, images: Tensor) -> Tensor:
        """Encodes normalized images from `transform`: float32 (B, C, H, W) -> (B, D).

        Raises:
            ValueError: for images of another shape, or of an integer type.
        """
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise ValueError("images are float32 (B, C, H, W), as this encoder's transform makes them")
        wanted = (self.input.in_chans, *self.input.img_size)
        if images.shape[1:] != wanted:
            raise ValueError(
                f"images of {tuple(images.shape)}: this encoder takes (B, {', '.join(map(str, wanted))}), as its "
                "transform makes them (load_encoder takes img_size=..., which interpolates its positions)"
            )
        return self.features(images)

    def transform(self, image: ImageLike) -> Tensor:
        """Crops, resizes and normalizes one image for the encoder.

        It crops the largest centered box of the encoder's aspect ratio, resizes it (antialiased)
        and normalizes it. Fine-tuning evaluates on the same view.

        Args:
            image: a path, the bytes of an image file, a PIL image, or an array: uint8 (H, W, 3) or (H, W). An
                encoder of other bands takes their raw values (C, H, W), of its dtype, and no PIL image.

        Returns:
            float32 (C, H, W).

        Raises:
            InputError: if the image cannot be read or decoded.
        """
        pixels = np.require(self.crop(image), requirements="W")  # of a file, it may be read-only
        return self.normalize(torch.from_numpy(pixels)[None])[0]

    def crop(self, image: ImageLike) -> np.ndarray:
        """Crops and resizes one image like `transform`, but does not normalize it: raw values (C, H, W).

        Raises:
            InputError: if the image cannot be read or decoded.
        """
        bands = self.input.bands
        return self.crop_pixels(
            _pixels_of(image, self.input.in_chans) if bands is None else _bands_of(image, bands)
        )

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
        if bands is None:
            return (images.float() / 255 - mean) / std
        normalized, valid = bands.unit(images).sub_(mean).div_(std), bands.valid(images)
        return normalized if valid is None else normalized.masked_fill_(~valid, 0.0)

    def fit_bands(self, bands: Bands | None, where: str) -> None:
        """Reads the raw values of data from here on by the encoder's own scale, see `other_bands.fit_bands`.

        Raises:
            InputError: if the data have other bands than the encoder, with both.
        """
        self.input = replace(self.input, bands=fit_bands(self.input.bands, bands, where))


def _bands_of(image: ImageLike, bands: Bands) -> np.ndarray:
    """Returns raw values (C, H, W)."""
    count = len(bands.names)
    if isinstance(image, np.ndarray):
        if image.dtype != bands.dtype or image.ndim != 3 or len(image) != count:
            raise InputError(f"images are {bands.dtype} ({count}, H, W), not {image.dtype} {image.shape}")
        return image
    if isinstance(image, Image.Image):
        raise InputError(f"a PIL image has no {count} bands: give a file, or {bands.dtype} ({count}, H, W)")
    return _decode(image, partial(decode, channels=count, bands=bands))


def _pixels_of(image: ImageLike, channels: int) -> np.ndarray:
    """Returns uint8 (C, H, W)."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3):
            raise InputError(f"images are uint8 (H, W, 3) or (H, W), not {image.dtype} {image.shape}")
        image = Image.fromarray(image)
    try:
        if isinstance(image, Image.Image):
            if image.mode == "I" and image.format is None:
                # In an image from a file, mode "I" means 16 bits.
                raise DecodeError(
                    'pixels of mode "I" have no known range if they come from no file: convert them'
                )
            return np.ascontiguousarray(pixels_of(image, channels))
    except DecodeError as error:
        raise InputError(f"the image cannot be decoded: {error}") from None
    return _decode(image, partial(decode, channels=channels))


def _decode(image: str | Path | bytes, decoder: Callable[[bytes], np.ndarray]) -> np.ndarray:
    try:
        return decoder(image if isinstance(image, bytes) else Path(image).read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {image!s}: {error_reason(error)}") from None
    except DecodeError as error:
        named = str(image) if isinstance(image, str | Path) else "the image"
        raise InputError(f"{named} cannot be decoded: {error}") from None
