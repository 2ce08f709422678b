"""Loads an encoder from any supported weights, to compute features of images.

Shapes: B batch, C channels, H W pixels, D width.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

from torch import Tensor, nn

from mae_vit.core.errors import InputError
from mae_vit.core.user_files import expand_text, name_given
from mae_vit.data.views import IMAGENET_MEAN, IMAGENET_STD
from mae_vit.models.encoder_file import UNKNOWN, Cost, EncoderInfo, cost_of_info, cost_of_weights, read_info
from mae_vit.models.encoders.base import Encoder, LoadReport, as_map, pool_tokens
from mae_vit.models.encoders.vit import is_sincos, with_class_position
from mae_vit.models.geometry import Geometry, ViTGeometry, nearest_size
from mae_vit.models.sizes import SIZES, Pool
from mae_vit.training.checkpoints.checkpoint import STATE, step_of
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.load import check_complete, check_kind, load_weights
from mae_vit.weights.names import GIVEN, HEADS_BESIDE, SIZE_BESIDE, another_kind
from mae_vit.weights.read import Weights, read_weights
from mae_vit.weights.timm_network import TimmEncoder


class ViTFeatures(FeatureEncoder):
    """Pools the tokens of our encoder.

    Attributes:
        pool: "cls" for the mean of the class tokens, "mean" for that of the patch tokens.
        fc_norm: norm after the pooling, for weights that were trained with it.
    """

    def __init__(self, encoder: Encoder, images: ImageInput, *, pool: Pool, fc_norm: nn.Module) -> None:
        """Wraps an encoder whose weights are already loaded."""
        super().__init__(images)
        self.encoder, self.pool, self.fc_norm = encoder, pool, fc_norm
        self.num_features = int(encoder.embed_dim)

    def features(self, images: Tensor) -> Tensor:
        """Encodes and pools normalized images: (B, C, H, W) -> (B, D)."""
        return self.fc_norm(pool_tokens(self.encoder, self.encoder.forward_features(images), self.pool))

    def patch_map(self, images: Tensor) -> Tensor:
        """Returns the patch tokens as a map: (B, C, H, W) -> (B, D, rows, columns).

        A norm that was trained after the mean is applied to each token.
        """
        return as_map(self.encoder, self.fc_norm(self.encoder.forward_features(images)))


class PretrainedEncoder(ViTFeatures):
    """A pretrained encoder with its pooling and its normalization, in evaluation mode and without gradients.

    Attributes:
        info: geometry, normalization and history.
        weights: all tensors of the file, including a decoder if it has one.
    """

    def __init__(
        self, encoder: Encoder, *, fc_norm: nn.Module, pool: Pool, info: EncoderInfo, weights: Weights
    ) -> None:
        """Wraps an encoder whose weights are already loaded. Use `load_encoder` to load them."""
        facts = (info.img_size, info.in_chans, info.mean, info.std)
        images = ImageInput(*facts, bands=info.bands, preprocessing=info.preprocessing)
        super().__init__(encoder, images, pool=pool, fc_norm=fc_norm)
        self.info, self.weights = info, weights
        self.eval().requires_grad_(False)

    def notes(self, asked: str) -> list[str]:
        """Returns remarks on the weights and assumptions about them, as lines; `asked` is the user's name for them."""
        assumed = [self.weights.assumes(getattr(self.info.geometry, "num_heads", None))]
        if not self.weights.mean:
            assumed.append("ImageNet's normalization, as the file does not give its own")
        return [
            *(f"note: {asked}: {title}: {text}" for title, text in self.weights.remarks.items()),
            *(f"note: {asked} is assumed to have {fact}" for fact in filter(None, assumed)),
        ]

    def description(self) -> dict[str, Any]:
        """Returns the facts, as JSON, that determine the features: source, digest, sizes, normalization."""
        return {
            "start": self.weights.source,
            "digest": self.weights.digest,
            "objective": self.info.objective,
            "step": self.info.step,
            "patch_size": self.info.geometry.patch_size,
            "pool": self.pool,
            **super().description(),
        }


def load_encoder(
    source: str | os.PathLike[str], *, img_size: int | Sequence[int] | None = None, pool: Pool | None = None
) -> FeatureEncoder:
    """Loads an encoder, ours or third-party; prints assumptions about it to stderr.

    Args:
        source: a run folder, an `encoder.safetensors`, a third-party file (official MAE, DINO, MoCo v3, Lightning,
            transformers, mmpretrain, torchvision; "FILE@teacher" takes one of several networks), "timm:NAME",
            "timm:NAME@FILE", a folder with timm's config.json, or "hf:USER/NAME[@REVISION]" on the Hub.
        img_size: side in pixels, or (H, W), divisible by the patch size; positions are interpolated.
            None for the training size.
        pool: "cls" or "mean". None takes "mean", or a classifier's own; for third-party weights "cls". Networks
            that ours cannot be, such as DINOv2 and ConvNeXt, always use their own.

    Returns:
        A `PretrainedEncoder`, whose `weights.source` names the commit; else a `TimmEncoder`.

    Raises:
        InputError: if there are no weights, or they belong to no supported encoder.
        FetchUnavailable: if the Hub cannot be reached.
    """
    source = name_given(source, GIVEN)
    weights = read_weights(expand_text(source))
    if weights.network is None:
        encoder = encoder_from_weights(weights, img_size=img_size, pool=pool)
        for note in encoder.notes(source):
            print(note, file=sys.stderr)
        return encoder
    if pool is not None:
        raise InputError(f'pool="{pool}" has no effect on {source}, which pools as timm says; leave it out')
    images = weights.network.images
    size = images.img_size if img_size is None else _height_width(img_size)
    return TimmEncoder(weights, replace(images, img_size=size))


def encoder_from_weights(
    weights: Weights, *, img_size: int | Sequence[int] | None = None, pool: Pool | None = None
) -> PretrainedEncoder:
    """Builds the encoder from weights that `read_weights` returned; see `load_encoder`.

    Raises InputError if the weights belong to no supported encoder, or the size is not divisible by the patch size.
    """
    if pool not in (None, "cls", "mean"):
        raise InputError(f'pool="{pool}": must be "cls" or "mean"')
    info = info_from_weights(weights)
    if img_size is not None:
        geometry, size = info.geometry, _height_width(img_size, info.geometry.patch_size)
        if size != geometry.img_size and isinstance(geometry, ViTGeometry):  # also interpolates a fixed table
            geometry = replace(geometry, pos_embed="learnable")
        geometry = replace(geometry, img_size=size)
        info = replace(info, geometry=geometry)
    encoder = info.geometry.build()
    if pool == "cls" and not encoder.num_class_tokens:
        raise InputError(f'pool="cls" needs a class token, and {weights.source} has none; leave it out')
    fc_norm = load_features(weights, encoder)[1]
    return PretrainedEncoder(encoder, fc_norm=fc_norm, pool=pool or weights.pool, info=info, weights=weights)


def load_features(weights: Weights, encoder: Encoder) -> tuple[LoadReport, nn.Module]:
    """Loads an encoder to compute features, with the norm of its training.

    Usually this is the final norm, after the last block, for both kinds of pooling. Weights that were fine-tuned on the
    mean of the patch tokens have `fc_norm` after the mean instead (official MAE code). Returns the report, and the norm
    after the pooling (the identity if there is none). Raises InputError if the weights do not match, or lack a tensor.
    """
    after_pool = any(name.startswith("fc_norm.") for name in {*weights.tensors} - {*encoder.weights()})
    norm, none = nn.LayerNorm(encoder.embed_dim, eps=1e-6), nn.Identity()
    fc_norm = norm if after_pool else none
    if encoder.has_final_norm:
        encoder.norm = none if after_pool else norm
    report = load_weights(weights, encoder)
    names = [f"fc_norm.{name}" for name in fc_norm.state_dict()]
    check_complete(weights, [*report.random, *(name for name in names if name not in weights.tensors)])
    fc_norm.load_state_dict({name.removeprefix("fc_norm."): weights.tensors[name] for name in names})
    report.skipped = [name for name in report.skipped if name not in names]
    report.loaded += names
    return report, fc_norm


def info_from_weights(weights: Weights) -> EncoderInfo:
    """Returns geometry, normalization and history of weights, from their metadata and shapes.

    Raises InputError if they belong to no supported network, or if the number of heads is unknown.
    """
    if weights.network is not None:
        raise InputError(
            f"{weights.source} is {weights.network.name}; only our Vision Transformers are inspected and exported"
        )
    geometry = weights.geometry or _geometry_of_shapes(weights)
    info = EncoderInfo(
        geometry,
        mean=weights.mean or _imagenet(IMAGENET_MEAN, geometry.in_chans, weights.source),
        std=weights.std or _imagenet(IMAGENET_STD, geometry.in_chans, weights.source),
        objective=weights.objective or "unknown",
        bands=weights.bands,
        preprocessing=weights.preprocessing,
        pool=weights.pool,
    )
    path, history = weights.path, ("objective", "step", "images_seen", "flops", "before")
    known = read_info(path)
    if (path / STATE).is_file():  # one of our checkpoints; a finished run has its encoder two folders up
        info = replace(info, step=step_of(path))
        beside = read_info(path.parents[1] / "encoder.safetensors")
        same = beside is not None and (beside.step, beside.objective) == (info.step, info.objective)
        known = beside if same else None
    return info if known is None else replace(info, **{name: getattr(known, name) for name in history})


def cost_of(weights: Weights) -> Cost:
    """Returns the cost of weights; that of a checkpoint is known only if the finished run records it."""
    if weights.path.is_file():
        return cost_of_weights(str(weights.path))
    try:
        return cost_of_info(info_from_weights(weights))
    except InputError:  # third-party weights
        return UNKNOWN


def _geometry_of_shapes(weights: Weights) -> Geometry:
    """Derives the geometry from tensor shapes, for files without metadata (official MAE, timm's names)."""
    check_kind(weights)
    tensors = weights.tensors
    try:
        embed_dim, in_chans, patch_size, _ = tensors["patch_embed.proj.weight"].shape
        _, class_tokens, _ = tensors["cls_token"].shape
        positions = with_class_position(tensors["pos_embed"], weights.grid)[0]
        mlp_width = tensors["blocks.0.mlp.fc1.weight"].shape[0]
    except KeyError as error:
        or_lost = ", or it is not complete" if "patch_embed.proj.weight" in tensors else ""
        raise another_kind(weights.source, f"it has no {error.args[0]}{or_lost}") from None
    except ValueError:
        if tensors["patch_embed.proj.weight"].ndim == 5:
            raise InputError(
                f"{weights.source}: its patches span several images, as in video; give an encoder of single images"
            ) from None
        raise another_kind(weights.source, "its patches are not images") from None
    num_patches = positions.shape[1] - class_tokens
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    rows, columns = grid = weights.grid or (round(num_patches**0.5),) * 2
    if rows * columns != num_patches:
        fault = f"do not fit the {rows} x {columns} patches of its config.json; correct the size there"
        if not weights.grid:
            fault = f"fit no square image; {SIZE_BESIDE}"
        raise InputError(f"{weights.source}: its positions {fault}")
    size = SIZES[nearest_size(embed_dim, depth)]
    exact = (size.embed_dim, size.depth) == (embed_dim, depth)
    heads = size.num_heads if exact and weights.num_heads is None else weights.num_heads
    if not isinstance(heads, int) or heads < 1 or embed_dim % heads:
        fault = f"{heads!r}, which does not divide its width {embed_dim}; correct its config.json"
        fault = f"not known; {HEADS_BESIDE}" if heads is None else fault
        raise InputError(f"{weights.source}: its number of heads is {fault}")
    return ViTGeometry(
        (rows * patch_size, columns * patch_size),
        patch_size,
        in_chans,
        nearest_size(embed_dim, depth),
        embed_dim,
        depth,
        num_heads=heads,
        mlp_ratio=mlp_width / embed_dim,
        pos_embed="sincos" if is_sincos(positions, grid, class_tokens) else "learnable",
        class_tokens=class_tokens,
    )


def _imagenet(values: tuple[float, ...], channels: int, source: str) -> tuple[float, ...]:
    """Returns ImageNet's values for weights that do not state their normalization; for gray images their mean."""
    if channels == len(values):
        return values
    if channels == 1:
        return (sum(values) / len(values),)
    raise InputError(f"{source} has {channels} channels and no normalization; give a run folder of ours")


def _height_width(img_size: int | Sequence[int], patch_size: int = 1) -> tuple[int, int]:
    try:
        sides = tuple(map(index, img_size if isinstance(img_size, Iterable) else (img_size, img_size)))
    except TypeError:  # not whole numbers
        sides = ()
    if len(sides) != 2 or min(sides) < 1:
        raise InputError(f"img_size={img_size!r}: must be one whole number above 0, or height and width")
    if any(side % patch_size for side in sides):
        nearest = [max(1, round(side / patch_size)) * patch_size for side in sides]
        raise InputError(f"img_size={img_size} is not divisible by patch_size={patch_size}; use {nearest}")
    return sides
