"""An encoder of one's own: a small MLP-Mixer (arXiv 2105.01601), which SimMIM pretrains by masked pixels.

    mae-vit pretrain simmim_digits 'run.plugins=[examples/mixer.py]' model.family=mixer model.name=mixer run.name=mixer

Shapes: B batch, C channels, H W pixels, P patch size, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from mae_vit.config.encoders import EncoderSection, register_encoder
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.geometry import Geometry


class MixerBlock(nn.Module):
    """Mixes the places of each channel, then the channels of each place."""

    def __init__(self, places: int, width: int) -> None:
        """Builds (B, N, D) -> (B, N, D)."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mixes (B, N, D)."""
        tokens = tokens + self.places(self.norm1(tokens).transpose(1, 2)).transpose(1, 2)
        return tokens + self.channels(self.norm2(tokens))


class MixerEncoder(Encoder):
    """Patches, blocks and a norm. It has no class token, so its features are means of the patches."""

    family = "mixer"
    num_prefix_tokens = num_class_tokens = 0

    def __init__(
        self, *, img_size: tuple[int, int], patch_size: int, in_chans: int, embed_dim: int, depth: int
    ) -> None:
        """Builds the encoder with fresh weights."""
        super().__init__()
        self.img_size, self.patch_size, self.in_chans = img_size, patch_size, in_chans
        self.grid_size = self.feature_grid = (img_size[0] // patch_size, img_size[1] // patch_size)
        self.embed_dim = embed_dim
        self.embed = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)
        self.blocks = nn.Sequential(*[MixerBlock(self.num_patches, embed_dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim)

    def forward_features(self, images: Tensor) -> Tensor:
        """Encodes whole images: (B, C, H, W) -> (B, N, D)."""
        return self.norm(self.blocks(self.embed(images).flatten(2).transpose(1, 2)))

    def layer_of(self, name: str) -> int | None:
        """Returns the number of a parameter's layer; None for the norm."""
        part, _, rest = name.partition(".")
        return int(rest.partition(".")[0]) + 1 if part == "blocks" else 0 if part == "embed" else None


@dataclass(frozen=True)
class MixerGeometry(Geometry):
    """What an encoder file says of it."""

    family = "mixer"
    built_by = f"{__name__}:MixerEncoder"

    embed_dim: int
    depth: int

    def describe(self) -> str:
        """Says in words what it is."""
        return f"a mixer of {self.depth} blocks, width {self.embed_dim}"


class MixerSection(EncoderSection):
    """The `model` section of a config with `family: mixer`.

    Attributes:
        patch_size: side of a patch in pixels.
        embed_dim: width.
        depth: number of blocks.
    """

    family: Literal["mixer"]
    name: Literal["mixer"]
    patch_size: int = Field(default=2, gt=0)
    embed_dim: int = Field(default=64, gt=0)
    depth: int = Field(default=4, gt=0)

    def geometry(self) -> MixerGeometry:
        """Returns the architecture; raises ValueError for options that do not fit."""
        self.check_patches(self.patch_size)
        return MixerGeometry(self.image_hw, self.patch_size, self.channels, self.embed_dim, self.depth)


register_encoder(MixerSection, MixerGeometry)
