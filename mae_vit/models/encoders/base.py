"""The interface of encoders to objectives, weights, fine-tuning and inspection.

Shapes: B batch, C channels, H W pixels, P patch size, N patches, N_keep visible patches, k prefix tokens, n image
tokens (N, or the cells of a network's map), D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.core.errors import InputError
from mae_vit.models.geometry import Geometry
from mae_vit.models.patches import gather_patches
from mae_vit.models.sizes import Pool

# Height and width, or rows and columns.
Pair = tuple[int, int]


@dataclass
class LoadReport:
    """How each tensor of pretrained weights was loaded.

    Attributes:
        loaded: names of the loaded tensors.
        interpolated: position tables that were resampled to another grid -> both grids.
        adapted: patch projections that were changed to another number of channels -> description.
        kept: tensors that the model keeps on purpose -> reason.
        skipped: names in the file that the model does not use.
        random: names of the model that the file lacks; they keep their random values.
        by_design: names of model or file that are not loaded by design -> reason.
        share: fraction of the encoder's parameters that were loaded, adapted, kept or left out by design, 0 to 1.
        remarks: remarks of `Weights`, and assumptions about them.
    """

    loaded: list[str] = field(default_factory=list)
    interpolated: dict[str, str] = field(default_factory=dict)
    adapted: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    by_design: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    remarks: dict[str, str] = field(default_factory=dict)

    def describe(self, source: str) -> str:
        """Returns the report as lines of text."""
        lines = [f"weights  {source}: {self.share:.1%} of the encoder's parameters"]
        lines += [f"  {title:<13} {text}" for title, text in self.remarks.items()]
        lines.append(f"  loaded        {len(self.loaded)} tensors: {shorten(self.loaded)}")
        for title, notes in (
            ("interpolated", self.interpolated),
            ("adapted", self.adapted),
            ("kept", self.kept),
            ("not loaded", self.by_design),
        ):
            lines += [f"  {title:<13} {name} ({note})" for name, note in notes.items()]
        for title, names in (("skipped", self.skipped), ("left random", self.random)):
            if names:
                lines.append(f"  {title:<13} {len(names)} tensors: {shorten(names)}")
        return "\n".join(lines)


def shorten(names: list[str]) -> str:
    """Lists names by their first part, with counts: blocks (72), patch_embed (2)."""
    counts: dict[str, int] = {}
    for name in names:
        first = name.split(".")[0]
        counts[first] = counts.get(first, 0) + 1
    return ", ".join(first if count == 1 else f"{first} ({count})" for first, count in counts.items())


class DoesNotFit(ValueError):
    """Weights do not match an encoder; the message names the difference."""


class Encoder(nn.Module):
    """An encoder of images.

    All families override `forward_features`, which suffices for SimMIM and the contrast. Families that can skip masked
    patches (for MAE and contrastive MAE) override `forward_visible`; families whose patch embeddings can be replaced
    (for masked patch prediction) override `embed_patches` and `forward_replaced`. Config sections declare both
    abilities.

    Attributes:
        family: key in `ENCODERS`.
        img_size: (H, W).
        patch_size: P.
        in_chans: C.
        grid_size: rows and columns of patches.
        feature_grid: rows and columns of the n tokens of `forward_features`; differs from `grid_size` in networks.
        embed_dim: D.
        num_prefix_tokens: k, number of tokens before the image tokens.
        num_class_tokens: number of first prefix tokens that `pool="cls"` reads.
        fixed: names of tensors that follow from the geometry, which weights may lack.
        has_final_norm: whether `norm` is the last layer; a mean read-out moves it after the mean.
    """

    family: str
    img_size: tuple[int, int]
    patch_size: int
    in_chans: int
    grid_size: tuple[int, int]
    feature_grid: tuple[int, int]
    embed_dim: int
    num_prefix_tokens: int
    num_class_tokens: int
    fixed: frozenset[str] = frozenset()
    has_final_norm: bool = False

    if TYPE_CHECKING:  # timm's modules are not typed

        def __getattr__(self, name: str) -> Any: ...

    @property
    def num_patches(self) -> int:
        """N."""
        return self.grid_size[0] * self.grid_size[1]

    def _lacks(self, method: str) -> InputError:
        return InputError(f"the encoder {type(self).__name__} needs a method {method} here; add it")

    def forward_features(self, images: Tensor) -> Tensor:
        """Encodes whole images: normalized (B, C, H, W) -> (B, k + n, D)."""
        raise self._lacks("forward_features")

    def forward_visible(self, images: Tensor, ids_keep: Tensor) -> Tensor:
        """Encodes the visible patches only (MAE Sec. 3): (B, C, H, W), int64 (B, N_keep) -> (B, k + N_keep, D).

        The output has the order of `ids_keep`.
        """
        raise self._lacks("forward_visible")

    def embed_patches(self, images: Tensor) -> Tensor:
        """Projects patches, without positions: (B, C, H, W) -> (B, N, D)."""
        raise self._lacks("embed_patches")

    def forward_replaced(self, patch_tokens: Tensor) -> Tensor:
        """Adds positions to patch embeddings, some of them replaced (ViT App. B.1.2), and encodes.

        (B, N, D) from `embed_patches` -> (B, k + N, D).
        """
        raise self._lacks("forward_replaced")

    def layer_of(self, name: str) -> int | None:
        """Returns the number of a parameter's layer for layer-wise rate decay.

        0 is the embedding layer, 1 the first block, and so on; None is the last layer, with the final norm. Raises
        ValueError for a name that belongs to no layer.
        """
        raise self._lacks("layer_of")

    def weights(self) -> dict[str, Tensor]:
        """Returns all tensors by their names in an encoder file."""
        return self.state_dict()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Loads all tensors by their names in an encoder file."""
        self.load_state_dict(tensors)

    def check(self, tensors: dict[str, Tensor], geometry: Geometry | None, num_heads: int | None) -> None:
        """Checks differences that tensor shapes do not show; `geometry` and `num_heads` are None if unknown.

        Raises DoesNotFit if the tensors belong to another network.
        """

    def adapt(
        self, name: str, loaded: Tensor, report: LoadReport, *, img_size: Pair | None, grid: Pair | None
    ) -> Tensor | None:
        """Adapts a loaded tensor to this encoder and records it in `report`; returns None to keep the encoder's own.

        `img_size` and `grid` (rows and columns of patches) are those of the weights; None if unknown. Raises DoesNotFit
        if it cannot be adapted.
        """
        expected = self.weights()[name]
        if loaded.shape != expected.shape:
            hint = ""
            if (
                type(self).adapt is Encoder.adapt
                and img_size
                and img_size != getattr(self, "img_size", img_size)
            ):
                hint = f"; give model.img_size={list(img_size)}, or let {type(self).__name__}.adapt resize it"
            raise DoesNotFit(f"{name} is {list(loaded.shape)} there, {list(expected.shape)} here{hint}")
        report.loaded.append(name)
        return loaded


class Transformer(Encoder):
    """The common parts of Vision Transformers with timm's names.

    Attributes:
        first_layer: name prefixes of the parameters in layer 0.
    """

    has_final_norm = True
    first_layer: tuple[str, ...]

    def _finish(self, img_size: tuple[int, int], patch_size: int, num_heads: int, class_tokens: int) -> None:
        """Sets the attributes, and initializes all parameters except positions as the official MAE code does."""
        self.img_size, self.patch_size = img_size, patch_size
        self.grid_size = self.feature_grid = (img_size[0] // patch_size, img_size[1] // patch_size)
        self.num_heads, self.num_class_tokens = num_heads, class_tokens
        self.apply(init_transformer)
        projection = self.patch_embed.proj
        nn.init.xavier_uniform_(projection.weight.view(projection.weight.shape[0], -1))  # a linear layer
        nn.init.zeros_(projection.bias)
        nn.init.normal_(self.cls_token, std=0.02)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=0.02)

    def prefix(self) -> Tensor:
        """Returns the prefix tokens, [CLS] first: (1, k, D)."""
        return self.cls_token if self.reg_token is None else torch.cat([self.cls_token, self.reg_token], 1)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Projects patches, without positions: (B, C, H, W) -> (B, N, D)."""
        return self.patch_embed(images)

    def embed_visible(self, images: Tensor, ids_keep: Tensor) -> Tensor:
        """Projects the visible patches only: (B, C, H, W), int64 (B, N_keep) -> (B, N_keep, D).

        It gathers the pixels first, so masked patches are not projected.
        """
        weight, bias = self.patch_embed.proj.weight, self.patch_embed.proj.bias
        return F.linear(gather_patches(images, self.patch_size, ids_keep), weight.flatten(1), bias)

    def layer_of(self, name: str) -> int | None:
        """Numbers layers as ELECTRA (arXiv 2003.10555), BEiT and MAE Sec. A.1 do; None for the final norm."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        if name.startswith(self.first_layer):
            return 0
        if name.startswith("norm."):
            return None
        raise ValueError(f"parameter {name} belongs to no layer of a Vision Transformer")

    def check(self, tensors: dict[str, Tensor], geometry: Geometry | None, num_heads: int | None) -> None:
        """Checks for parts of another family, then the numbers of tokens, blocks and heads."""
        own = self.weights()
        if other := [n for n in tensors if n.startswith(("pos_embed", "blocks.0.")) and n not in own]:
            advice = "" if self.family == "vit" else "; use model.family=vit"
            raise DoesNotFit(f"it has {other[0]}, model.family={self.family} has none{advice}")
        depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
        more = tensors["reg_token"].shape[1] if geometry is None and "reg_token" in tensors else 0
        registers = self.num_prefix_tokens - self.num_class_tokens
        for key, theirs, ours in (
            ("class_tokens", getattr(geometry, "class_tokens", 1 + more), self.num_class_tokens),
            ("register_tokens", getattr(geometry, "register_tokens", None), registers),
            ("depth", depth or None, len(self.blocks)),
            ("num_heads", num_heads, self.num_heads),
        ):
            if theirs not in (None, ours):
                raise DoesNotFit(f"{key} is {theirs} there, model.{key}={ours} here")

    def adapt(
        self, name: str, loaded: Tensor, report: LoadReport, *, img_size: Pair | None, grid: Pair | None
    ) -> Tensor | None:
        """Adapts the patch projection to another number of channels."""
        theirs, ours = loaded.shape, self.state_dict()[name].shape
        if theirs != ours and (name in ("cls_token", "norm.weight") or name.endswith("norm1.weight")):
            raise DoesNotFit(f"embed_dim is {theirs[-1]} there, model.embed_dim={ours[-1]} here")
        if theirs == ours or name != "patch_embed.proj.weight":
            return super().adapt(name, loaded, report, img_size=img_size, grid=grid)
        for axis, what in ((2, "patch_size"), (0, "embed_dim")):
            if loaded.ndim == 4 and theirs[axis] != ours[axis]:
                raise DoesNotFit(f"{what} is {theirs[axis]} there, model.{what}={ours[axis]} here")
        if loaded.ndim != 4 or theirs[3] != ours[3]:
            raise DoesNotFit(f"{name} is {list(theirs)} there, {list(ours)} here")
        adapted, report.adapted[name] = adapt_patch_projection(loaded.float(), ours[1])
        return adapted


def pool_tokens(encoder: Encoder, tokens: Tensor, pool: Pool) -> Tensor:
    """Averages the class tokens, as Pixio (arXiv 2512.15715) does, or the image tokens: (B, k + n, D) -> (B, D)."""
    if pool == "mean":
        return tokens[:, encoder.num_prefix_tokens :].mean(dim=1)
    count = encoder.num_class_tokens
    return tokens[:, 0] if count == 1 else tokens[:, :count].mean(dim=1)


def init_transformer(module: nn.Module) -> None:
    """Initializes one layer as the official MAE code does; for `Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def adapt_patch_projection(weight: Tensor, channels: int) -> tuple[Tensor, str]:
    """Adapts a patch projection (D, C, P, P) to another number of channels; returns it with a phrase on the change.

    Weights are scaled by old / new channels, as in timm's `adapt_input_conv`. More channels take the old ones in turn
    (0, 1, 2, 0, 1, ...); fewer take the mean of all, because turns would drop some. An image whose channels are all
    equal keeps its embedding if each old channel is taken equally often.
    """
    old = weight.shape[1]
    scale = old / channels
    if channels > old:
        turns = -(-channels // old)
        adapted = weight.repeat(1, turns, 1, 1)[:, :channels] * scale
        done = f"repeated in turn, times {old}/{channels}"
    else:
        adapted = weight.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1) * scale
        done = f"each the mean of {old}, times {old}/{channels}"
    return adapted.contiguous(), f"{old} -> {channels} channels, {done}"


def as_map(encoder: Encoder, tokens: Tensor) -> Tensor:
    """Arranges the image tokens as a map: (B, k + n, D) -> (B, D, rows, columns)."""
    return tokens[:, encoder.num_prefix_tokens :].transpose(1, 2).unflatten(2, encoder.feature_grid)
