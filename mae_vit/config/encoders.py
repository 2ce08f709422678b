"""The `model` section of a config: one class for each family of encoders, and the dictionary of them below.

To add a family, give its options a section here and its facts a geometry in `mae_vit.models.geometry`, and write the
encoder (`mae_vit.models.encoders.base.Encoder`) in a file of its own. A config is checked without importing torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mae_vit.config.section import OneOf, Section
from mae_vit.config.typed_yaml import PathText
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest
from mae_vit.models.geometry import GEOMETRIES, Geometry, NetworkGeometry, ViTGeometry, ViTRopeGeometry
from mae_vit.models.sizes import BASELINE_NAMES, SIZES, TIMM_PREFIX, WITHOUT_DROP_PATH, Size

# Channels of images that are not described as bands.
_PHOTOGRAPH_CHANNELS = 3
# Hyperspectral sensors have 200 to 500.
_MAX_CHANNELS = 4096
# Masking stores a patch's number in 16 bits.
_MOST_PATCHES = 2**16
# Default patch size of a network: for images smaller than the bound, and for others.
_SMALL_IMAGES, _SMALL_PATCH, _LARGE_PATCH = 128, 4, 16


class EncoderSection(Section, ABC):
    """The `model` section of a config.

    A family's section states what its encoder can do: `skips_patches` (encode the visible patches alone, which MAE
    needs), `replaces_patches` (take other embeddings of patches), and `has_class_token`.

    Attributes:
        family: kind of the encoder; by default that of `name`.
        name: size or name of the network.
        img_size: side of the images in pixels, or `[height, width]`.
        in_chans: number of bands of the images; null takes the data's.
        init: pretrained weights to begin from.
    """

    skips_patches: ClassVar[bool] = False
    replaces_patches: ClassVar[bool] = False
    has_class_token: ClassVar[bool] = False

    family: str
    name: str
    img_size: int | list[int]
    in_chans: int | None = Field(default=None, gt=0, le=_MAX_CHANNELS)
    init: PathText | None = None

    @property
    def one_graph(self) -> bool:
        """Whether torch.compile is known to make one graph of it."""
        return False

    @abstractmethod
    def geometry(self) -> Geometry:
        """Returns the architecture that the options define.

        Raises:
            ValueError: if they do not fit each other; the message names the keys.
        """

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width in pixels; raises ValueError if the config gives neither one number nor two."""
        sides = [self.img_size] * 2 if isinstance(self.img_size, int) else self.img_size
        if len(sides) != 2:
            raise ValueError(f"img_size={self.img_size}: must be one number or [height, width]")
        return sides[0], sides[1]

    @property
    def channels(self) -> int:
        """Bands of the images. Until the data are known they are taken for photographs."""
        return self.in_chans or _PHOTOGRAPH_CHANNELS

    @property
    def drops(self) -> dict[str, float]:
        """The rates of dropout and stochastic depth, as arguments of `Geometry.build`."""
        return {}

    def check_patches(self, patch_size: int) -> None:
        """Checks that patches fill the images.

        Raises:
            ValueError: if not; the message names the nearest sizes that do.
        """
        for side in self.image_hw:
            if side <= 0 or side % patch_size:
                near, common = max(1, round(side / patch_size)) * patch_size, math.gcd(*self.image_hw)
                # A patch size that fits each side at least twice.
                fitting = [size for size in range(2, min(common, 1024)) if common % size == 0]
                nearest = min(fitting, key=lambda size: abs(size - patch_size), default=None)
                raise ValueError(
                    f"patch_size={patch_size} does not divide img_size={self.img_size} "
                    f"(nearest side that fits: {near}{f', nearest patch_size: {nearest}' if nearest else ''})"
                )
        num_patches = (self.image_hw[0] // patch_size) * (self.image_hw[1] // patch_size)
        if num_patches > _MOST_PATCHES:
            raise ValueError(
                f"patch_size={patch_size} makes {num_patches} patches; the limit is {_MOST_PATCHES}"
            )


class _TransformerSection(EncoderSection):
    """What both Vision Transformers have: `name` sets width, depth and heads, which further keys change.

    Attributes:
        name: size: width, depth and heads (`Ti`, `S`, `B`, `L`, `H` as in the ViT and DeiT papers).
        patch_size: side of a patch in pixels.
        embed_dim: width of the encoder.
        depth: number of blocks.
        num_heads: attention heads of a block.
        mlp_ratio: width of the MLP over `embed_dim`.
        drop_rate: dropout.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0.
    """

    skips_patches: ClassVar[bool] = True
    replaces_patches: ClassVar[bool] = True
    has_class_token: ClassVar[bool] = True

    name: Literal["tiny-cifar", "Ti", "S", "B", "L", "H"]
    patch_size: int = Field(gt=0)
    embed_dim: int | None = Field(default=None, gt=0)
    depth: int | None = Field(default=None, gt=0, le=1000)
    num_heads: int | None = Field(default=None, gt=0)
    mlp_ratio: float = Field(default=4.0, gt=0)
    drop_rate: float = Field(default=0.0, ge=0, lt=1)
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> _TransformerSection:
        self.check_patches(self.patch_size)
        return self

    @property
    def size(self) -> Size:
        """Width, depth and heads, after the keys that change them."""
        size = SIZES[self.name]
        return Size(
            self.embed_dim or size.embed_dim, self.depth or size.depth, self.num_heads or size.num_heads
        )

    @property
    def drops(self) -> dict[str, float]:
        return {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}

    def _shared(self) -> dict[str, Any]:
        size = self.size
        if size.embed_dim % size.num_heads:
            raise ValueError(
                f"embed_dim={size.embed_dim} is not divisible by model.num_heads={size.num_heads}"
            )
        return {
            **{"img_size": self.image_hw, "patch_size": self.patch_size, "in_chans": self.channels},
            **{"size": self.name, "embed_dim": size.embed_dim, "depth": size.depth},
            **{"num_heads": size.num_heads, "mlp_ratio": self.mlp_ratio},
        }


class ViTSection(_TransformerSection):
    """The Vision Transformer of the papers.

    Attributes:
        pos_embed: learnable positions, or fixed sin-cos ones.
        class_tokens: number of class tokens. The read-out `pool="cls"` is the mean of several (Pixio, arXiv
            2512.15715, has 8).
    """

    family: Literal["vit"] = "vit"
    pos_embed: Literal["learnable", "sincos"] = "learnable"
    class_tokens: int = Field(default=1, gt=0)

    @property
    def one_graph(self) -> bool:  # noqa: D102
        return True

    def geometry(self) -> ViTGeometry:  # noqa: D102
        shared = self._shared()
        if self.pos_embed == "sincos" and shared["embed_dim"] % 4:
            raise ValueError(f'embed_dim={shared["embed_dim"]} must be divisible by 4 for pos_embed="sincos"')
        return ViTGeometry(**shared, pos_embed=self.pos_embed, class_tokens=self.class_tokens)


class ViTRopeSection(_TransformerSection):
    """A Vision Transformer with rotary positions and register tokens, as DINOv3 has them (arXiv 2508.10104).

    Attributes:
        register_tokens: tokens besides [CLS], dropped after the last block (arXiv 2309.16588).
    """

    family: Literal["vit_rope"]
    register_tokens: int = Field(default=4, ge=0)

    def geometry(self) -> ViTRopeGeometry:  # noqa: D102
        shared = self._shared()
        if shared["embed_dim"] // shared["num_heads"] % 4:
            raise ValueError(
                f"embed_dim={shared['embed_dim']} / num_heads={shared['num_heads']} must be divisible by 4 for "
                "rotary positions"
            )
        return ViTRopeGeometry(**shared, register_tokens=self.register_tokens)


class NetworkSection(EncoderSection):
    """Another network: a baseline, or `timm:NAME`.

    Attributes:
        name: `SimpleCNN`, `SmallResNet`, `SmallBiT` or `timm:NAME`.
        patch_size: side in pixels of the squares that `simmim` masks; null is 4, or 16 for images of 128 px or more.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0.
    """

    family: Literal["network"] = "network"
    patch_size: int | None = Field(default=None, gt=0)
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)

    @property
    def drops(self) -> dict[str, float]:  # noqa: D102
        return {"drop_path_rate": self.drop_path_rate}

    @property
    def one_graph(self) -> bool:  # noqa: D102
        return self.name in BASELINE_NAMES

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name in BASELINE_NAMES:
            return name
        if name in SIZES:
            raise ValueError(f'"{name}" is a Vision Transformer; give model.family=vit')
        if not name.startswith(TIMM_PREFIX):
            known = (*SIZES, *BASELINE_NAMES)
            meant = closest(name, known) or f'give one of {", ".join(known)} or "{TIMM_PREFIX}NAME"'
            raise ValueError(
                f'there is no "{name}"; {meant} (an encoder of a plug-in also needs model.family)'
            )
        # Imports timm: only for its networks.
        from mae_vit.models.encoders.baselines import check_network

        check_network(name)
        return name

    @model_validator(mode="after")
    def _check(self) -> NetworkSection:
        if min(self.image_hw) <= 0:
            raise ValueError(f"img_size={self.img_size}: must be above 0")
        if self.drop_path_rate and self.name in WITHOUT_DROP_PATH:
            raise ValueError(f'drop_path_rate has no effect with name="{self.name}"')
        return self

    def geometry(self) -> NetworkGeometry:  # noqa: D102
        patch_size = self.patch_size
        if patch_size is None:
            patch_size = _SMALL_PATCH if min(self.image_hw) < _SMALL_IMAGES else _LARGE_PATCH
        self.check_patches(patch_size)
        return NetworkGeometry(self.image_hw, patch_size, self.channels, self.name)


ENCODERS: dict[str, type[EncoderSection]] = {
    "vit": ViTSection,
    "vit_rope": ViTRopeSection,
    "network": NetworkSection,
}


def family_of(raw: Any) -> str:
    """Returns the family of a `model` section: as given, or by its name: `vit` for a ViT's size, else `network`."""
    get = raw.get if isinstance(raw, dict) else lambda key: getattr(raw, key, None)
    name = get("name")
    return str(get("family") or ("vit" if name is None or str(name) in SIZES else "network"))


def section_class(family: object, source: object) -> type[EncoderSection]:
    """Returns the section of a family that weights in `source` name; raises InputError if it is not registered."""
    if (section := ENCODERS.get(str(family))) is None:
        raise InputError(
            f'{source} needs a plug-in for model.family="{family}"; give --plugin FILE (for training '
            "run.plugins=[FILE]), or in Python import its module first"
        )
    return section


def register_encoder(section: type[EncoderSection], geometry: type[Geometry]) -> None:
    """Adds a plug-in's family of encoders, under its geometry's name; raises ValueError if there is another."""
    if ENCODERS.setdefault(geometry.family, section) is not section:
        raise ValueError(f'there is already an encoder "{geometry.family}"; choose another family')
    GEOMETRIES[geometry.family] = geometry


EncoderConfig = Annotated[EncoderSection, OneOf(ENCODERS, "family", family_of)]
