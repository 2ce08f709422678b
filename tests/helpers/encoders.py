"""Facts of small Vision Transformers."""

from collections.abc import Sequence

from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.geometry import ViTGeometry


def vit_info(
    size: str,
    img_size: tuple[int, int],
    patch_size: int,
    in_chans: int,
    embed_dim: int,
    depth: int,
    num_heads: int,
    mlp_ratio: float,
    pos_embed: str,
    mean: Sequence[float],
    std: Sequence[float],
    objective: str,
    step: int,
    *,
    class_tokens: int = 1,
    **facts,
) -> EncoderInfo:
    geometry = ViTGeometry(
        img_size,
        patch_size,
        in_chans,
        size,
        embed_dim,
        depth,
        num_heads,
        mlp_ratio,
        pos_embed,
        class_tokens=class_tokens,
    )
    return EncoderInfo(geometry, mean, std, objective, step, **facts)


def vit_geometry(**changes) -> ViTGeometry:
    """A small geometry: 4 x 4 patches of 4 px unless changed."""
    facts = {"img_size": (16, 16), "patch_size": 4, "in_chans": 3, "size": "S", "embed_dim": 32, "depth": 2}
    return ViTGeometry(**{**facts, "num_heads": 4, "mlp_ratio": 4.0, "pos_embed": "learnable", **changes})
