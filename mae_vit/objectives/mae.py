"""Masked autoencoder: pixel reconstruction from 25 % of the patches (arXiv 2111.06377).

Shapes: B images, C channels, H W pixels, N patches, N_keep visible patches, M predicted patches, P patch size,
k class tokens, D encoder width, D_dec decoder width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.attention import PlainOrFusedAttention
from mae_vit.models.encoders.base import Encoder, init_transformer
from mae_vit.models.encoders.vit import block_for_queries, sincos_position_table
from mae_vit.models.masking import Masking, unit_masking
from mae_vit.models.patches import patchify, take_tokens
from mae_vit.objectives.config import MAEConfig, num_decoded_patches
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels
from mae_vit.objectives.reconstruction import (
    error_sums,
    local_average,
    psnr_metrics,
    reconstruction_pictures,
    standardize_patches,
    weigh,
)

# LayerNorm epsilon of the official code, everywhere (timm's default as well).
LAYER_NORM_EPS = 1e-6


class MAE(Objective):
    """The asymmetric autoencoder of MAE Sec. 3, with the official code's parameter names."""

    def __init__(self, encoder: Encoder, config: MAEConfig, **pixels: Unpack[Pixels]) -> None:
        super().__init__(encoder, **pixels)
        width = config.decoder_embed_dim
        self.mask_ratio, self.mask_unit = config.mask_ratio, config.mask_unit
        self.decode_ratio = config.decode_ratio
        self.norm_pix_loss = config.norm_pix_loss
        self.decoder_embed = nn.Linear(encoder.embed_dim, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed = nn.Parameter(
            sincos_position_table(encoder.grid_size, width, encoder.num_prefix_tokens), requires_grad=False
        )
        options = {"mlp_ratio": 4.0, "qkv_bias": True, "attn_layer": PlainOrFusedAttention}
        blocks = [Block(width, config.decoder_num_heads, **options) for _ in range(config.decoder_depth)]
        self.decoder_blocks = nn.Sequential(*blocks)
        self.decoder_norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.decoder_pred = nn.Linear(width, encoder.patch_size**2 * encoder.in_chans)
        for name, module in self.named_children():
            if name != "encoder":
                module.apply(init_transformer)
        nn.init.normal_(self.mask_token, std=0.02)

    def draw_masking(self, keys: SampleKeys) -> Masking:
        """Draws the training masks."""
        return unit_masking(keys, self.encoder.grid_size, self.mask_ratio, self.mask_unit)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the reconstruction loss with the masks of the batch's keys."""
        return ObjectiveOutput(self.encode_and_reconstruct(batch)[0])

    def encode_and_reconstruct(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Masks by the batch's keys and predicts.

        Returns the loss, float32 (), and the encoded visible tokens (B, k + N_keep, D), class tokens first.
        """
        masking = self.draw_masking(batch.keys)
        images = self.normalize(batch.images)  # float32 (B, C, H, W)
        encoded = self.encoder.forward_visible(images, masking.ids_keep)  # (B, k + N_keep, D)
        ids = masking.ids_masked  # int64 (B, M)
        if self.decode_ratio < 1:
            # `ids_masked` is sorted by noise, so its first entries are a random choice of mask units by the keys.
            ids = ids[:, : num_decoded_patches(ids.shape[1], self.decode_ratio, self.mask_unit)]
            prediction = self.decode_subset(encoded, masking.ids_keep, ids)  # (B, M, P*P*C)
        else:
            # Visible patches do not enter the loss, so they are not predicted.
            prediction = self.decode(encoded, masking.ids_restore, ids)  # (B, M, P*P*C)
        valid = self.valid_patches(batch.images)  # (B, N, P*P*C)
        error = self.squared_error(images, prediction, ids, valid)  # (B, M, P*P*C)
        return weigh(error, None if valid is None else take_tokens(valid, ids)).mean(), encoded

    def predict_all(self, images: Tensor, masking: Masking) -> Tensor:
        """Encodes the visible patches of normalized images and predicts all patches: (B, N, P*P*C)."""
        return self.decode(self.encoder.forward_visible(images, masking.ids_keep), masking.ids_restore)

    def decode(self, encoded: Tensor, ids_restore: Tensor, ids: Tensor | None = None) -> Tensor:
        """Fills in mask tokens, restores the order and predicts pixels (MAE Sec. 3).

        (B, k + N_keep, D), int64 (B, N) -> (B, N, P*P*C), or (B, M, P*P*C) for the patches `ids`, int64 (B, M).
        """
        count = self.encoder.num_prefix_tokens
        tokens = self.decoder_embed(encoded)  # (B, k + N_keep, D_dec)
        num_masked = ids_restore.shape[1] - (tokens.shape[1] - count)
        mask_tokens = self.mask_token.to(tokens.dtype).expand(len(tokens), num_masked, -1)
        patches = torch.cat([tokens[:, count:], mask_tokens], dim=1)  # (B, N, D_dec), visible ones first
        patches = take_tokens(patches, ids_restore)  # in image order
        tokens = torch.cat([tokens[:, :count], patches], dim=1) + self.decoder_pos_embed  # (B, k + N, D_dec)
        if ids is None:
            return self.decoder_pred(self.decoder_norm(self.decoder_blocks(tokens)))[:, count:]
        tokens = self.decoder_blocks[:-1](tokens)
        # Class tokens come first.
        tokens = block_for_queries(self.decoder_blocks[-1], tokens, ids + count)  # (B, M, D_dec)
        return self.decoder_pred(self.decoder_norm(tokens))

    def decode_subset(self, encoded: Tensor, ids_keep: Tensor, ids: Tensor) -> Tensor:
        """Predicts the masked patches `ids` from the visible ones; the decoder does not see other masked patches.

        (B, k + N_keep, D) in the order of `ids_keep`, int64 (B, M) -> (B, M, P*P*C). The order of tokens is not
        restored: it does not matter, because tokens carry their positions.
        """
        count = self.encoder.num_prefix_tokens
        tokens = self.decoder_embed(encoded)  # (B, k + N_keep, D_dec)
        mask_tokens = self.mask_token.to(tokens.dtype).expand(*ids.shape, -1)  # (B, M, D_dec)
        # (B, k + N_keep + M); row 0 of the table, zeros, serves all class tokens.
        places = F.pad(torch.cat([ids_keep, ids], dim=1) + count, (count, 0))
        tokens = torch.cat([tokens, mask_tokens], dim=1) + F.embedding(places, self.decoder_pos_embed[0])
        tokens = self.decoder_blocks[:-1](tokens)
        predicted = torch.arange(encoded.shape[1], tokens.shape[1], device=tokens.device).expand_as(ids)
        tokens = block_for_queries(self.decoder_blocks[-1], tokens, predicted)  # (B, M, D_dec)
        return self.decoder_pred(self.decoder_norm(tokens))

    def squared_error(
        self, images: Tensor, prediction: Tensor, ids: Tensor | None = None, valid: Tensor | None = None
    ) -> Tensor:
        """Computes the squared errors, for training, held-out images and exports.

        The loss is their mean over masked patches only (MAE Sec. 3). Errors of missing values are meaningless:
        `mae_vit.objectives.reconstruction.weigh` leaves them out.
        (B, N, P*P*C), or (B, M, P*P*C) for the patches `ids`, -> float32 of the same shape.
        """
        target, _, _ = self.targets(images, ids, valid)  # (B, N or M, P*P*C)
        return (prediction.float() - target).square()

    def targets(
        self, images: Tensor, ids: Tensor | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the regression target of all patches or of `ids`, and the mean and scale that undo its normalization.

        With norm_pix_loss the mean and unbiased variance of its valid values normalize each patch (MAE Sec. 4.1,
        "Reconstruction target"). PSNR and pictures treat targets as pixels: a subclass with other targets overrides
        both. (B, N, P*P*C), (B, N, 1), (B, N, 1); M instead of N with `ids`.
        """
        target = patchify(images, self.encoder.patch_size)  # (B, N, P*P*C)
        if ids is not None:
            target = take_tokens(target, ids)  # (B, M, P*P*C)
            valid = None if valid is None else take_tokens(valid, ids)
        if not self.norm_pix_loss:
            return target, torch.zeros_like(target[..., :1]), torch.ones_like(target[..., :1])
        return standardize_patches(target, valid)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss and the squared errors on masked patches, for the model and for an untrained baseline.

        With norm_pix_loss the baseline predicts zero and uses the true patch statistics; in raw pixels it
        is a local average of the visible patches.
        """
        images, masking = self.normalize(batch.images), self.draw_masking(batch.keys)
        prediction, mask = self.predict_all(images, masking), masking.mask
        valid = self.valid_patches(batch.images)
        error = weigh(self.squared_error(images, prediction, valid=valid), valid, mask)  # (B, N, P*P*C)
        loss = error.mean(dim=-1)  # (B, N)
        return {"loss": (loss * mask).sum(), **self.pixel_errors(images, prediction, mask, valid)}

    def pixel_errors(
        self, images: Tensor, prediction: Tensor, mask: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        """Sums squared errors in pixels of a prediction (B, N, P*P*C) and of the baseline of `evaluation_sums`."""
        pixels, mean = self.undo_targets(images, prediction, valid)
        baseline = mean.expand_as(pixels)
        if not self.norm_pix_loss:
            baseline = local_average(images, mask, self.encoder, valid)
        return error_sums(self, images, (pixels, baseline), mask, valid)

    def undo_targets(self, images: Tensor, prediction: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns predictions in the units of `images`, (B, N, P*P*C), and the patches' means, (B, N, 1)."""
        _, mean, scale = self.targets(images, valid=valid)
        return prediction.float() * scale + mean, mean

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss, PSNR on masked patches in dB, and its gain over the baseline."""
        return {"loss": sums["loss"] / sums["masked"], **psnr_metrics(sums)}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted and original images."""
        images, masking = self.normalize(batch.images), self.draw_masking(batch.keys)
        prediction, mask = self.predict_all(images, masking), masking.mask
        valid = self.valid_patches(batch.images)
        pixels, _ = self.undo_targets(images, prediction, valid)
        return reconstruction_pictures(self, batch.images, pixels, mask, self.predicted_label)

    @property
    def predicted_label(self) -> str:
        """The label of predictions in pictures; states whether they use the true patch statistics."""
        return "predicted (true patch mean and std)" if self.norm_pix_loss else "predicted"
