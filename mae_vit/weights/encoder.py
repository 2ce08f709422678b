"""Loads an encoder from any supported weights, ready to turn images into features.

Shapes: B batch, C channels, H W pixels, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.data.images.augment import center_crop
from mae_vit.data.images.decode import DecodeError, decode, pixels_of
from mae_vit.data.normalization import IMAGENET_MEAN, IMAGENET_STD
from mae_vit.models.encoder_file import EncoderInfo, read_info
from mae_vit.models.geometry import Geometry, nearest_size
from mae_vit.models.pos_embed import sincos_position_table
from mae_vit.models.vit import SIZES, Pool, ViTEncoder, pooled
from mae_vit.training.checkpoints.format import STATE, step_of
from mae_vit.weights.load import load_weights
from mae_vit.weights.read import read_weights
from mae_vit.weights.start import Weights

ImageLike = str | Path | bytes | Image.Image | np.ndarray


class PretrainedEncoder(nn.Module):
    """A pretrained encoder with its pooling and its normalization.

    Attributes:
        encoder: timm's VisionTransformer, in evaluation mode.
        pool: "cls" pools [CLS] or the mean of several class tokens, "mean" that of the patch tokens.
        info: geometry, normalization and history.
        start: all tensors of the file, including a decoder if it has one.
    """

    def __init__(self, encoder: ViTEncoder, *, pool: Pool, info: EncoderInfo, start: Weights) -> None:
        """Wraps an encoder whose weights are already loaded. Use `load_encoder` to load them."""
        super().__init__()
        self.encoder, self.pool, self.info, self.start = encoder, pool, info, start
        # A classifier that pools the mean has its norm after the mean, and none before it (official MAE code).
        self.fc_norm: nn.Module = nn.Identity()
        if "fc_norm.weight" in start.tensors:
            encoder.norm = nn.Identity()
            self.fc_norm = nn.LayerNorm(encoder.embed_dim, eps=1e-6)
            self.fc_norm.load_state_dict(
                {name: start.tensors[f"fc_norm.{name}"] for name in ("weight", "bias")}
            )
        self.eval()

    @property
    def embed_dim(self) -> int:
        """D, the width of the features."""
        return int(self.encoder.embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Encodes normalized images from `transform`: float32 (B, C, H, W) -> (B, D).

        Raises:
            ValueError: for images of another shape, or of an integer type.
        """
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise ValueError("images are float32 (B, C, H, W), as this encoder's transform makes them")
        wanted = (self.info.in_chans, *self.info.img_size)
        if images.shape[1:] != wanted:
            raise ValueError(
                f"images of {tuple(images.shape)}: this encoder takes (B, {', '.join(map(str, wanted))}), as its "
                "transform makes them; load_encoder(..., img_size=...) interpolates its positions for others"
            )
        tokens = self.encoder.forward_features(images)
        return self.fc_norm(pooled(tokens, self.pool, self.encoder.num_prefix_tokens))

    def transform(self, image: ImageLike) -> Tensor:
        """Crops, resizes and normalizes one image for the encoder.

        It crops the largest centered box of the encoder's aspect ratio, resizes it (bicubic,
        antialiased) and normalizes it. Fine-tuning evaluates on the same view.

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
        bands = self.info.bands
        pixels = _pixels_of(image, self.info.in_chans) if bands is None else _bands_of(image, bands)
        return center_crop(pixels, self.info.img_size, bands)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalizes raw images for the encoder: (B, C, H, W) -> float32; missing values become 0."""
        shape = partial(torch.tensor, dtype=torch.float32, device=images.device)
        mean, std = (shape(list(values)).view(-1, 1, 1) for values in (self.info.mean, self.info.std))
        bands = self.info.bands
        if bands is None:
            return (images.float() / 255 - mean) / std
        normalized, valid = (bands.unit(images) - mean) / std, bands.valid(images)
        return normalized if valid is None else torch.where(valid, normalized, 0.0)


def load_encoder(
    start: str | Path, *, img_size: int | Sequence[int] | None = None, pool: Pool | None = None
) -> PretrainedEncoder:
    """Loads an encoder.

    Args:
        start: a run folder, an `encoder.safetensors`, an official MAE file (.pth), "timm:NAME", or
            "hf:USER/NAME[@REVISION]" of the Hub. `start.source` of the result names the commit.
        img_size: side in pixels, or (H, W), divisible by the patch size. Positions are interpolated.
            None takes the size of its training.
        pool: "cls" or "mean". None takes that of a fine-tuned run, else "cls".

    Raises:
        InputError: if there are no weights, or they are of no Vision Transformer that we support.
        FetchUnavailable: if the Hub cannot be reached.
    """
    return encoder_from_weights(read_weights(str(start)), img_size=img_size, pool=pool)


def encoder_from_weights(
    start: Weights, *, img_size: int | Sequence[int] | None = None, pool: Pool | None = None
) -> PretrainedEncoder:
    """Builds the encoder from weights that `read_weights` returned; see `load_encoder`.

    Raises:
        InputError: if the weights are of no encoder that we support, or the size does not fit.
    """
    if pool not in (None, "cls", "mean"):
        raise InputError(f'pool="{pool}": give "cls" or "mean"')
    info = info_from_weights(start)
    if img_size is not None:
        info = replace(info, img_size=_size(img_size, info.patch_size))
    encoder = info.build()
    load_weights(start, encoder)
    trained_pool: Pool = "mean" if "fc_norm.weight" in start.tensors else "cls"
    return PretrainedEncoder(encoder, pool=pool or trained_pool, info=info, start=start)


def info_from_weights(start: Weights) -> EncoderInfo:
    """Returns geometry, normalization and history of weights, from their metadata and their shapes.

    Raises:
        InputError: if they are of no Vision Transformer, or if the number of heads is unknown.
    """
    geometry = start.geometry or _geometry_of_shapes(start)
    info = EncoderInfo(
        **asdict(geometry),
        mean=start.mean or _imagenet(IMAGENET_MEAN, geometry.in_chans, start.source),
        std=start.std or _imagenet(IMAGENET_STD, geometry.in_chans, start.source),
        objective=start.objective or "unknown",
        step=0,
        bands=start.bands,
    )
    path, history = start.path, ("objective", "step", "images_seen", "flops")
    known = read_info(path)
    if (path / STATE).is_file():  # one of our checkpoints; a finished run leaves its encoder two folders up
        info = replace(info, step=step_of(path))
        beside = read_info(path.parents[1] / "encoder.safetensors")
        known = beside if beside is not None and beside.step == info.step else None
    return info if known is None else replace(info, **{name: getattr(known, name) for name in history})


def _geometry_of_shapes(start: Weights) -> Geometry:
    """Derives the geometry from tensor shapes, for files without metadata (official MAE files, timm's names)."""
    tensors = start.tensors
    try:
        embed_dim, in_chans, patch_size, _ = tensors["patch_embed.proj.weight"].shape
        num_patches = tensors["pos_embed"].shape[1] - 1
        hidden = tensors["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError):
        raise InputError(f"{start.source} holds no Vision Transformer by timm's names") from None
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    side = round(num_patches**0.5)
    if side * side != num_patches:
        raise InputError(
            f"{start.source}: its positions are of no square image, and it does not say of which"
        )
    known = nearest_size(embed_dim, depth)
    exact = (SIZES[known].embed_dim, SIZES[known].depth) == (embed_dim, depth)
    heads = start.num_heads or (SIZES[known].num_heads if exact else None)
    if heads is None:
        raise InputError(
            f"{start.source} does not say how many heads it has, and width {embed_dim} with {depth} blocks is none "
            f"of {', '.join(SIZES)}"
        )
    table = sincos_position_table((side, side), embed_dim) if embed_dim % 4 == 0 else None
    fixed = table is not None and torch.allclose(tensors["pos_embed"].float(), table, atol=1e-4)
    return Geometry(
        size=known,
        img_size=(side * patch_size, side * patch_size),
        patch_size=patch_size,
        in_chans=in_chans,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=hidden / embed_dim,
        pos_embed="sincos" if fixed else "learnable",
    )


def _imagenet(values: tuple[float, ...], channels: int, source: str) -> tuple[float, ...]:
    """Returns ImageNet's values for weights that do not state their normalization. Gray takes the colors' mean."""
    if channels == len(values):
        return values
    if channels == 1:
        return (sum(values) / len(values),)
    raise InputError(f"{source} takes images of {channels} channels and does not say how they are normalized")


def _size(img_size: int | Sequence[int], patch_size: int) -> tuple[int, int]:
    sides = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(sides) != 2:
        raise InputError(f"img_size={img_size}: give one number, or height and width")
    height, width = sides
    for side in sides:
        if side % patch_size or side < patch_size:
            nearest = max(1, round(side / patch_size)) * patch_size
            raise InputError(
                f"img_size={img_size}: {side} is not divisible by the encoder's patch_size={patch_size}: {nearest} is"
            )
    return height, width


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
