"""The encoder of all objectives: timm's VisionTransformer with two entry points for masked images.

Shapes: B batch, C channels, H W pixels, P patch size, N patches, N_keep visible
patches, k class tokens, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from mae_vit.models.attention import PlainOrFusedAttention
from mae_vit.models.patches import gather_patches, take_tokens
from mae_vit.models.pos_embed import sincos_position_table
from mae_vit.models.sizes import Pool, PositionKind


def init_transformer(module: nn.Module) -> None:
    """Initializes one layer as the official MAE code does. Use it with `Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def pooled(tokens: Tensor, pool: Pool, class_tokens: int = 1) -> Tensor:
    """Pools the mean of the class tokens ([CLS] itself if there is one), or that of the patch tokens.

    Args:
        tokens: (B, k + N, D), class tokens first.
        pool: "cls" or "mean".
        class_tokens: k. Pixio (arXiv 2512.15715) reads the mean of several class tokens.

    Returns:
        (B, D).
    """
    if pool == "mean":
        return tokens[:, class_tokens:].mean(dim=1)
    return tokens[:, 0] if class_tokens == 1 else tokens[:, :class_tokens].mean(dim=1)


def block_for_queries(block: Block, tokens: Tensor, ids: Tensor) -> Tensor:
    """Runs a block for the tokens `ids` (B, m), which attend to all n: (B, n, D) -> (B, m, D).

    The result equals that of the whole block at `ids`, but no queries and no MLP are computed for other
    tokens. The block must have no drop-path and no layer scale.
    """
    mixed = take_tokens(tokens, ids) + block.attn.forward_queries(block.norm1(tokens), ids)  # (B, m, D)
    return mixed + block.mlp(block.norm2(mixed))


class ViTEncoder(VisionTransformer):
    """timm's VisionTransformer without a head, with entries for masked images.

    Its state dict is timm's, so it loads strictly into `timm.create_model` of the
    same geometry. Initialization follows the official MAE code: xavier-uniform
    linear layers (the patch projection as a linear layer), class tokens and learnable
    positions normal with std 0.02. Class tokens beyond the first are timm's register tokens.
    """

    def __init__(
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
        """Builds the encoder.

        Args:
            img_size: (H, W) in pixels, both divisible by `patch_size`.
            patch_size: P.
            in_chans: C.
            embed_dim: D.
            depth: number of blocks.
            num_heads: attention heads; divides D.
            mlp_ratio: hidden width of the MLP over D.
            pos_embed: "learnable" 1-D (ViT Sec. 3.1) or fixed 2-D "sincos" (MAE Sec. 3).
            class_tokens: k, at least 1; each has a position of its own (Pixio, arXiv 2512.15715, has 8).
            drop_rate: dropout after positions are added and after every dense layer except
                the q, k, v projection (ViT App. B.1).
            drop_path_rate: rate of stochastic depth at the last block; it grows linearly from 0 at the first.
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
        self.img_size = img_size
        self.patch_size = patch_size
        self.grid_size: tuple[int, int] = (img_size[0] // patch_size, img_size[1] // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self._init_weights(pos_embed)

    def _init_weights(self, pos_embed: PositionKind) -> None:
        self.apply(init_transformer)
        projection = self.patch_embed.proj
        nn.init.xavier_uniform_(projection.weight.view(projection.weight.shape[0], -1))
        nn.init.zeros_(projection.bias)
        nn.init.normal_(self.cls_token, std=0.02)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=0.02)
        if pos_embed == "sincos":
            self.pos_embed.data.copy_(
                sincos_position_table(self.grid_size, self.embed_dim, self.num_prefix_tokens)
            )
            self.pos_embed.requires_grad_(False)
        else:
            nn.init.normal_(self.pos_embed, std=0.02)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Projects patches, without positions: (B, C, H, W) -> (B, N, D)."""
        return self.patch_embed(images)

    def encode(self, patch_tokens: Tensor) -> Tensor:
        """Runs the class tokens and the given patch tokens through all blocks and the final norm.

        Args:
            patch_tokens: (B, n, D), positions added.

        Returns:
            (B, k + n, D), class tokens first.
        """
        cls_tokens = (
            self.cls_token if self.reg_token is None else torch.cat([self.cls_token, self.reg_token], 1)
        )
        cls_tokens = cls_tokens + self.pos_embed[:, : self.num_prefix_tokens]  # (1, k, D)
        tokens = torch.cat([cls_tokens.expand(len(patch_tokens), -1, -1), patch_tokens], dim=1)
        return self.norm(self.blocks(self.pos_drop(tokens)))

    def forward_visible(self, images: Tensor, ids_keep: Tensor) -> Tensor:
        """Encodes the visible patches only (MAE Sec. 3, "MAE encoder").

        Args:
            images: (B, C, H, W), normalized.
            ids_keep: int64 (B, N_keep), patch numbers; the output keeps their order.

        Returns:
            (B, k + N_keep, D).
        """
        # Gather pixels before projecting them. The tokens are the same, and masked patches are not
        # projected.
        weight, bias = self.patch_embed.proj.weight, self.patch_embed.proj.bias
        # (B, N_keep, C*P*P) -> (B, N_keep, D)
        tokens = F.linear(gather_patches(images, self.patch_size, ids_keep), weight.flatten(1), bias)
        return self.encode(tokens + F.embedding(ids_keep, self.pos_embed[0, self.num_prefix_tokens :]))

    def forward_replaced(self, patch_tokens: Tensor) -> Tensor:
        """Encodes patch embeddings after some were replaced (ViT App. B.1.2).

        Args:
            patch_tokens: (B, N, D), from `embed_patches`, some replaced;
                this method adds the positions.

        Returns:
            (B, k + N, D).
        """
        return self.encode(patch_tokens + self.pos_embed[:, self.num_prefix_tokens :])
