"""A Vision Transformer with 2-D rotary positions and register tokens: timm's Eva, as in timm's DINOv3.

Queries and keys are rotated by their coordinates, -1 to 1 along both sides (RoPE, arXiv 2104.09864; DINOv3,
arXiv 2508.10104, Sec. 3.2), so images of another size need no table. Unlike DINOv3 it has no layer scale.
Shapes: B batch, C channels, H W pixels, P patch size, N patches, N_keep visible patches, k prefix tokens, D width,
d width of a head.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from torch import Tensor, nn

from mae_vit.models.encoders.base import Transformer


class ViTRopeEncoder(Eva, Transformer):
    """timm's Eva without a head, with entry points for masked images. Its state dict is timm's.

    Initialization follows the official MAE code, as in `ViTEncoder`.
    """

    family = "vit_rope"
    first_layer = ("cls_token", "reg_token", "patch_embed.")

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
        register_tokens: int = 4,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        """Builds the encoder with options of `ViTEncoder`; the k - 1 `register_tokens` come after [CLS].

        Nothing reads register tokens. D / heads must be divisible by 4.
        """
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=0,
            global_pool="",
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            num_reg_tokens=register_tokens,
            pos_drop_rate=drop_rate,
            proj_drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            use_abs_pos_emb=False,
            use_rot_pos_emb=True,
            rope_type="dinov3",
            rope_temperature=100.0,
            rope_rotate_half=True,
        )
        self._finish(img_size, patch_size, num_heads, class_tokens=1)

    def encode(self, patch_tokens: Tensor, rope: Tensor) -> Tensor:
        """Runs prefix tokens and patch tokens through all blocks and the final norm: (B, n, D) -> (B, k + n, D).

        `rope` has sines and cosines of the patches' coordinates, (n, 2d), or (B, 1, n, 2d) if images differ.
        """
        tokens = self.pos_drop(
            torch.cat([self.prefix().expand(len(patch_tokens), -1, -1), patch_tokens], dim=1)
        )
        for block in self.blocks:
            tokens = block(tokens, rope=rope)
        return self.norm(tokens)

    def forward_features(self, images: Tensor) -> Tensor:
        """Encodes whole images: (B, C, H, W) -> (B, k + N, D)."""
        return self.forward_replaced(self.embed_patches(images))

    def forward_visible(self, images: Tensor, ids_keep: Tensor) -> Tensor:
        """Encodes the visible patches only: (B, C, H, W), int64 (B, N_keep) -> (B, k + N_keep, D)."""
        tokens = self.embed_visible(images, ids_keep)
        return self.encode(tokens, F.embedding(ids_keep, self.rope.get_embed())[:, None])

    def forward_replaced(self, patch_tokens: Tensor) -> Tensor:
        """Encodes patch embeddings after some were replaced: (B, N, D) -> (B, k + N, D)."""
        return self.encode(patch_tokens, self.rope.get_embed())
