"""The architecture of an encoder, one class for each family. Importing this module imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from mae_vit.models.sizes import SIZES, PositionKind

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

    from mae_vit.models.encoders.base import Encoder


@dataclass(frozen=True)
class Geometry(ABC):
    """The architecture of an encoder, as far as all families share it.

    Attributes:
        img_size: (H, W) in pixels, both divisible by `patch_size`.
        patch_size: P, side in pixels of the patches that objectives mask.
        in_chans: C.
    """

    family: ClassVar[str]
    # Module and class of the encoder, "package.module:Class", imported by `build`.
    built_by: ClassVar[str]
    # Prefix of an encoder's parameter names that an encoder file leaves out.
    holder: ClassVar[str] = ""

    img_size: tuple[int, int]
    patch_size: int
    in_chans: int

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    def build(self, **drops: float) -> Encoder:
        """Builds an encoder of this geometry with fresh weights; `drops` are rates of dropout and drop-path.

        Raises ValueError if there is no such encoder, for example if a network does not take such images.
        """
        encoder: Encoder = resolve_name(self.built_by)(**self._arguments(), **drops)
        return encoder

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of the encoder's class, without `size`, a mere name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "size"}

    @abstractmethod
    def describe(self) -> str:
        """Describes the architecture in words."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for `geometry_from`. A `vit` does not state its family."""
        return asdict(self) | ({} if self.family == "vit" else {"family": self.family})

    def to_config(self) -> dict[str, Any]:
        """Returns the geometry as a config's `model` section."""
        values = self.to_dict()
        name = values.pop("size", self.family)
        return {"name": name, **values, "img_size": list(self.img_size)}


@dataclass(frozen=True)
class _TransformerGeometry(Geometry):
    """The common part of Vision Transformers.

    Attributes:
        size: name in `mae_vit.models.sizes.SIZES` of its size, or of the nearest.
        embed_dim: D.
        depth: number of blocks.
        num_heads: attention heads; divides D.
        mlp_ratio: ratio of the MLP's inner width to D.
    """

    size: str
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float

    def describe(self) -> str:
        """Describes the architecture in words."""
        return f"{self.depth} blocks of {self.num_heads} heads, width {self.embed_dim}"


@dataclass(frozen=True)
class ViTGeometry(_TransformerGeometry):
    """A Vision Transformer.

    Attributes:
        pos_embed: "learnable" or "sincos".
        class_tokens: number of class tokens; files do not state 1.
    """

    family = "vit"
    built_by = "mae_vit.models.encoders.vit:ViTEncoder"

    pos_embed: PositionKind
    class_tokens: int = field(default=1, kw_only=True)


@dataclass(frozen=True)
class ViTRopeGeometry(_TransformerGeometry):
    """A Vision Transformer with rotary positions and register tokens; D / heads is divisible by 4.

    Attributes:
        register_tokens: number of tokens besides [CLS], dropped after the last block.
    """

    family = "vit_rope"
    built_by = "mae_vit.models.encoders.vit_rope:ViTRopeEncoder"

    register_tokens: int

    def describe(self) -> str:
        """Describes the architecture in words."""
        return f"{super().describe()}, rotary positions"


@dataclass(frozen=True)
class NetworkGeometry(Geometry):
    """A baseline, or one of timm's networks, with a feature map.

    Attributes:
        size: name of the network, as in `model.name`.
    """

    family = "network"
    built_by = "mae_vit.models.encoders.network:NetworkEncoder"
    holder = "network."

    size: str

    def _arguments(self) -> dict[str, Any]:
        return {"name": self.size, **super()._arguments()}

    def describe(self) -> str:
        """Describes the architecture in words."""
        return self.size


GEOMETRIES: dict[str, type[Geometry]] = {
    kind.family: kind for kind in (ViTGeometry, ViTRopeGeometry, NetworkGeometry)
}


def geometry_from(values: Mapping[str, Any]) -> Geometry | None:
    """Returns the geometry from field names and values; None if a field without a default is missing."""
    kind = GEOMETRIES.get(values.get("family") or "vit")
    if kind is None:
        return None
    geometry: dict[str, Any] = {
        item.name: values.get(item.name, None if item.default is MISSING else item.default)
        for item in fields(kind)
    }
    if any(value is None for value in geometry.values()):
        return None
    height, width = geometry["img_size"]
    return kind(**{**geometry, "img_size": (int(height), int(width))})


def nearest_size(embed_dim: int, depth: int, num_heads: int | None = None) -> str:
    """Returns the name of the size with this width and depth; "S" if there is none."""
    for name, size in SIZES.items():
        if (size.embed_dim, size.depth) == (embed_dim, depth) and num_heads in (None, size.num_heads):
            return name
    return "S"


def timm_geometry(model: VisionTransformer) -> ViTGeometry:
    """Returns the geometry of a model from timm."""
    block, embed = model.blocks[0], model.patch_embed
    width, depth, heads = model.embed_dim, len(model.blocks), block.attn.num_heads
    height, width_px = embed.img_size
    return ViTGeometry(
        img_size=(height, width_px),
        patch_size=embed.patch_size[0],
        in_chans=embed.proj.in_channels,
        size=nearest_size(width, depth, heads),
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=block.mlp.fc1.out_features / width,
        pos_embed="learnable",
    )
