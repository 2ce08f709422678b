"""Our MAE against transformers' ViTMAEForPreTraining: same weights, same masks, same numbers."""

import pytest
import torch
from helpers.weights.official_weights import convert, position_table, theirs

from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.masking import patch_noise
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.mae import MAE


def ours(img_size: int, patch_size: int, norm_pix_loss: bool) -> MAE:
    encoder = ViTEncoder(
        img_size=(img_size, img_size),
        patch_size=patch_size,
        embed_dim=64,
        depth=3,
        num_heads=4,
        pos_embed="sincos",
    )
    config = MAEConfig(
        name="mae", decoder_embed_dim=48, decoder_depth=2, decoder_num_heads=4, norm_pix_loss=norm_pix_loss
    )
    return config.build(encoder, mean=[0.5] * 3, std=[0.25] * 3).eval()


@pytest.mark.parametrize(
    ("img_size", "patch_size", "norm_pix_loss"), [(96, 16, True), (32, 4, True), (32, 4, False)]
)
def test_same_loss_and_predictions(img_size: int, patch_size: int, norm_pix_loss: bool) -> None:
    reference, model = theirs(img_size, patch_size, norm_pix_loss), ours(img_size, patch_size, norm_pix_loss)
    model.load_state_dict(convert(reference.state_dict()), strict=True)
    images = torch.randn(4, 3, img_size, img_size)
    ranks = patch_noise(SampleKeys(0, 0, torch.arange(4)), model.encoder.num_patches)
    # Ranks need 48 bits; as float32 noise their order alone counts.
    noise = ranks.argsort(dim=1).argsort(dim=1).float()
    with torch.no_grad():
        expected = reference(images, noise=noise)
        prediction, mask = model.reconstruct(images, ranks)
        loss = model.masked_mse(images, prediction, mask)
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert torch.equal(mask, expected.mask.float())
    torch.testing.assert_close(prediction, expected.logits, atol=1e-4, rtol=0)
    assert prediction.std() > 0.05


def test_position_tables() -> None:
    """Ours against the formula written out, value by value."""
    model = ours(32, 4, True)
    for table, width in ((model.encoder.pos_embed, 64), (model.decoder_pos_embed, 48)):
        torch.testing.assert_close(table.data, position_table(8, width), atol=1e-6, rtol=0)
        assert not table.requires_grad
