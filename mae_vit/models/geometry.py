"""The numbers that define the architecture of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mae_vit.models.sizes import SIZES, PositionKind

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

    from mae_vit.models.vit import ViTEncoder


@dataclass(frozen=True)
class Geometry:
    """The geometry of an encoder.

    Attributes:
        size: name in `mae_vit.models.vit.SIZES` that it derives from, or that is nearest.
        img_size: (H, W) in pixels, both divisible by `patch_size`.
        patch_size: P, in pixels.
        in_chans: C.
        embed_dim: D.
        depth: number of blocks.
        num_heads: attention heads; divides D.
        mlp_ratio: hidden width of the MLP over D.
        pos_embed: "learnable" or "sincos".
        class_tokens: class tokens; older files do not state it and have one.
    """

    size: str
    img_size: tuple[int, int]
    patch_size: int
    in_chans: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    pos_embed: PositionKind
    class_tokens: int = field(default=1, kw_only=True)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    def build(self, *, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> ViTEncoder:
        """Builds an encoder of this geometry, with fresh weights."""
        # Imports torch and timm, which a config is checked without.
        from mae_vit.models.vit import ViTEncoder

        options = {one.name: getattr(self, one.name) for one in fields(Geometry)}
        del options["size"]
        return ViTEncoder(**options, drop_rate=drop_rate, drop_path_rate=drop_path_rate)

    def to_config(self) -> dict[str, Any]:
        """Returns the geometry as a config's `model` section."""
        values = asdict(self)
        return {"name": values.pop("size"), **values, "img_size": list(self.img_size)}


# The keys of a config's `model` section that define the geometry, besides `name`.
GEOMETRY_KEYS = tuple(one.name for one in fields(Geometry) if one.name != "size")


def geometry_from(values: Mapping[str, Any]) -> Geometry | None:
    """Returns the geometry from a mapping by field names; None if a field without a default is missing."""
    geometry: dict[str, Any] = {
        one.name: values.get(one.name, None if one.default is MISSING else one.default)
        for one in fields(Geometry)
    }
    if any(value is None for value in geometry.values()):
        return None
    height, width = geometry["img_size"]
    return Geometry(**{**geometry, "img_size": (int(height), int(width))})


def nearest_size(embed_dim: int, depth: int, num_heads: int | None = None) -> str:
    """Returns the name of the size of this width and depth; "S" if there is none."""
    names = [
        name
        for name, size in SIZES.items()
        if (size.embed_dim, size.depth) == (embed_dim, depth) and num_heads in (None, size.num_heads)
    ]
    return names[0] if names else "S"


def geometry_of(model: VisionTransformer) -> Geometry:
    """Returns the geometry of a model that timm has built."""
    block, embed = model.blocks[0], model.patch_embed
    shape = (model.embed_dim, len(model.blocks), block.attn.num_heads)
    mlp_ratio = block.mlp.fc1.out_features / model.embed_dim
    height, width = embed.img_size
    return Geometry(
        nearest_size(*shape),
        (height, width),
        embed.patch_size[0],
        embed.proj.in_channels,
        *shape,
        mlp_ratio,
        "learnable",
    )
