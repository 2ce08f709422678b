"""The Vision Transformer of the papers: timm's, with two entry points for masked images.

Shapes: B batch, C channels, H W pixels, P patch size, N patches, N_keep visible patches, k class tokens, D width.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from mae_vit.models.attention import PlainOrFusedAttention
from mae_vit.models.encoders.base import DoesNotFit, LoadReport, Pair, Transformer
from mae_vit.models.patches import take_tokens
from mae_vit.models.sizes import PositionKind


def sincos_position_table(grid_size: tuple[int, int], embed_dim: int, class_tokens: int = 1) -> Tensor:
    """Builds the fixed 2-D table of the official MAE code: float32 (1, k + N, D), D divisible by 4.

    The first half of the channels encodes the column and the second half the row, each as sines, then
    cosines. The first k rows, for the class tokens, are zero. Raises ValueError if 4 does not divide D.
    """
    if embed_dim % 4:
        raise ValueError(f"sincos positions need a width divisible by 4, not {embed_dim}")
    frequencies = 1.0 / 10000 ** (np.arange(embed_dim // 4, dtype=np.float64) / (embed_dim / 4))
    rows, columns = np.meshgrid(np.arange(grid_size[0]), np.arange(grid_size[1]), indexing="ij")
    halves = []
    for places in (columns, rows):
        angles = places.reshape(-1, 1).astype(np.float64) * frequencies  # (N, D / 4)
        halves += [np.sin(angles), np.cos(angles)]
    table = np.concatenate(halves, axis=1)  # (N, D)
    table = np.concatenate([np.zeros((class_tokens, embed_dim)), table])  # (k + N, D)
    return torch.from_numpy(table).float()[None]


def is_sincos(table: Tensor, grid_size: tuple[int, int], class_tokens: int = 1) -> bool:
    """Returns whether positions (1, k + N, D) are the fixed table of a grid, up to the rounding of their type."""
    if table.shape[-1] % 4 or table.shape[1] != grid_size[0] * grid_size[1] + class_tokens:
        return False
    fixed = sincos_position_table(grid_size, table.shape[-1], class_tokens)
    return torch.allclose(table.float(), fixed, atol=max(1e-4, torch.finfo(table.dtype).eps))


def block_for_queries(block: Block, tokens: Tensor, ids: Tensor) -> Tensor:
    """Runs a block for the tokens `ids` (B, m), which attend to all n: (B, n, D) -> (B, m, D).

    The result equals that of the whole block at `ids`, without the queries and MLP of other tokens. The
    block must have no drop-path and no layer scale.
    """
    mixed = take_tokens(tokens, ids) + block.attn.forward_queries(block.norm1(tokens), ids)  # (B, m, D)
    return mixed + block.mlp(block.norm2(mixed))


class ViTEncoder(VisionTransformer, Transformer):
    """timm's VisionTransformer without a head, with entry points for masked images.

    Its state dict is timm's, so it loads strictly into `timm.create_model` of the same geometry.
    Initialization follows the official MAE code: xavier-uniform linear layers (including the patch
    projection), class tokens and learnable positions normal with std 0.02. Class tokens beyond the first
    are timm's register tokens.
    """

    family = "vit"
    first_layer = ("cls_token", "reg_token", "pos_embed", "patch_embed.")

    def __init__(  # noqa: PLR0913 (an architecture's options, by name)
        self,
        *,
        img_size: tuple[int, int],
        patch_size: int,
        in_chans: int = 3,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        pos_embed: PositionKind = "learnable",
        class_tokens: int = 1,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        """Builds the encoder with fresh weights, from the options of `ViTGeometry`.

        Positions are learnable 1-D (ViT Sec. 3.1) or fixed 2-D "sincos" (MAE Sec. 3); each class token has its own
        (Pixio, arXiv 2512.15715, has 8). `drop_rate` is dropout after positions are added and after every dense layer
        except the q, k, v projection (ViT App. B.1); `drop_path_rate` is stochastic depth at the last block, which
        grows linearly from 0 at the first.
        """
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=0,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            reg_tokens=class_tokens - 1,
            pos_drop_rate=drop_rate,
            proj_drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            attn_layer=PlainOrFusedAttention,
            weight_init="skip",
        )
        self._finish(img_size, patch_size, num_heads, class_tokens)
        if pos_embed == "sincos":
            self.pos_embed.data.copy_(
                sincos_position_table(self.grid_size, self.embed_dim, self.num_prefix_tokens)
            )
            self.pos_embed.requires_grad_(False)
            self.fixed = frozenset({"pos_embed"})
        else:
            nn.init.normal_(self.pos_embed, std=0.02)

    def encode(self, patch_tokens: Tensor) -> Tensor:
        """Runs class tokens and patch tokens with positions through all blocks and the final norm.

        (B, n, D) -> (B, k + n, D), class tokens first.
        """
        cls_tokens = self.prefix() + self.pos_embed[:, : self.num_prefix_tokens]  # (1, k, D)
        tokens = torch.cat([cls_tokens.expand(len(patch_tokens), -1, -1), patch_tokens], dim=1)
        return self.norm(self.blocks(self.pos_drop(tokens)))

    def forward_visible(self, images: Tensor, ids_keep: Tensor) -> Tensor:
        """Encodes the visible patches only: (B, C, H, W), int64 (B, N_keep) -> (B, k + N_keep, D)."""
        tokens = self.embed_visible(images, ids_keep)
        return self.encode(tokens + F.embedding(ids_keep, self.pos_embed[0, self.num_prefix_tokens :]))

    def forward_replaced(self, patch_tokens: Tensor) -> Tensor:
        """Encodes patch embeddings after some were replaced: (B, N, D) -> (B, k + N, D)."""
        return self.encode(patch_tokens + self.pos_embed[:, self.num_prefix_tokens :])

    def adapt(
        self, name: str, loaded: Tensor, report: LoadReport, *, img_size: Pair | None, grid: Pair | None
    ) -> Tensor | None:
        """Adapts the patch projection to another number of channels, and learned positions to another grid.

        It resamples positions in 2-D, and keeps the rows of class tokens. Of an unknown grid it takes the encoder's if
        they are its fixed table, else a square. Fixed positions are only checked: the encoder computes its own table.
        Raises DoesNotFit if a tensor cannot be adapted.
        """
        if name != "pos_embed":
            return super().adapt(name, loaded, report, img_size=img_size, grid=grid)
        expected, count = self.pos_embed, self.num_prefix_tokens
        if grid or loaded.shape[1:2] != expected.shape[1:2]:
            loaded, added = with_class_position(loaded, grid)
            if added:
                report.adapted["pos_embed"] = (
                    "has no row for the class token, so it is 0 there: the same function"
                )
        if loaded.ndim != 3 or loaded.shape[-1] != expected.shape[-1]:
            raise DoesNotFit(
                f"embed_dim is {loaded.shape[-1]} there, model.embed_dim={expected.shape[-1]} here"
            )
        num_loaded = loaded.shape[1] - count
        if grid and grid[0] * grid[1] != num_loaded:
            raise DoesNotFit(
                f"its pos_embed has {loaded.shape[1]} rows for {grid[0]} x {grid[1]} patches, ours one for each and "
                f"{count} for class tokens"
            )
        square = (round(num_loaded**0.5),) * 2
        guesses = (grid,) if grid else (self.grid_size, square)
        fixed = next((one for one in guesses if is_sincos(loaded, one, count)), None)
        if name in self.fixed:
            if fixed is None:
                raise DoesNotFit('it has learned positions; use model.pos_embed="learnable"')
            function = "the same function" if fixed == self.grid_size else "computed for this img_size"
            report.kept["pos_embed"] = f"fixed sin-cos table, {function}"
            return None
        grid = grid or fixed or (square if square[0] ** 2 == num_loaded else self.grid_size)
        if grid[0] * grid[1] != num_loaded:
            raise DoesNotFit(f"pos_embed of {num_loaded} patches does not fit a square image")
        if grid == self.grid_size:
            report.loaded.append("pos_embed")
            return loaded
        rows, columns = self.grid_size
        report.interpolated["pos_embed"] = f"{grid[0]} x {grid[1]} -> {rows} x {columns} patches"
        return resample_abs_pos_embed(loaded.float(), [rows, columns], [*grid], num_prefix_tokens=count)


def with_class_position(table: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, bool]:
    """Adds a row of zeros for the class token to positions (1, N, D), if they have none.

    Returns the table, and whether the row was added: if N is the grid's, or without a grid a square, because a square
    plus 1 is never a square.
    """
    rows, columns = grid or (isqrt(table.shape[1]),) * 2
    if table.ndim != 3 or rows * columns != table.shape[1]:
        return table, False
    return torch.cat([table.new_zeros(1, 1, table.shape[2]), table], dim=1), True
