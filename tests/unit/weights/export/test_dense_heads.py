"""The timm export as the encoder of a library for segmentation, where that is installed."""

import pytest
import torch
from helpers.export import encoder_file, export
from safetensors.torch import load_file

import mae_vit


@pytest.mark.slow
def test_segmentation_models_pytorch_trains_a_head_on_it(tmp_path):
    """As docs/export.md says: its maps are ours, and a loss reaches encoder and head."""
    smp = pytest.importorskip("segmentation_models_pytorch")
    # Twelve blocks, as the network of that name has: smp takes no other number.
    path = encoder_file(tmp_path / "encoder.safetensors", depth=12, img_size=(32, 32))
    assert export(path, "--to", "timm", "--out", tmp_path / "out") == 0
    model = smp.DPT(
        "tu-vit_tiny_patch16_224",
        encoder_weights=None,
        decoder_intermediate_channels=(16, 16, 32, 32),
        decoder_fusion_channels=16,
        classes=3,
        **{"img_size": 32, "patch_size": 4, "embed_dim": 32, "num_heads": 4, "num_classes": 0},
    )
    model.encoder.model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ours = mae_vit.load_encoder(path)
    with torch.no_grad():
        maps, _ = model.eval().encoder(images)
        tokens = maps[-1].permute(0, 2, 3, 1)  # (B, rows, columns, D), before the final norm
        torch.testing.assert_close(
            ours.encoder.norm(tokens).permute(0, 3, 1, 2), ours.patch_map(images), atol=1e-4, rtol=0
        )
    model.train()(images).square().mean().backward()
    for part in (model.encoder.model.blocks[0].attn.qkv, model.segmentation_head.head[0]):
        assert part.weight.grad.abs().sum() > 0
