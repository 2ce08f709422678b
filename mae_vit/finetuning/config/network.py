"""The config section of networks that are not ours: baselines and those of timm."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from mae_vit.config.section import MAX_CHANNELS, PHOTOGRAPH_CHANNELS, Section, height_width
from mae_vit.models.sizes import BASELINE_NAMES, SIZES, TIMM_PREFIX, WITHOUT_DROP_PATH


class NetworkSection(Section):
    """Another network: a baseline, or `timm:NAME`.

    Attributes:
        name: `SimpleCNN`, `SmallResNet`, `SmallBiT`, `SmallHybrid` or `timm:NAME`.
        img_size: side of the images in pixels, or `[height, width]`.
        in_chans: number of bands of the images; null takes the data's.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0.
    """

    name: str
    img_size: int | list[int]
    in_chans: int | None = Field(default=None, gt=0, le=MAX_CHANNELS)
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name in BASELINE_NAMES:
            return name
        if not name.startswith(TIMM_PREFIX):
            known = ", ".join((*SIZES, *BASELINE_NAMES))
            raise ValueError(f'"{name}" is none of {known} and "{TIMM_PREFIX}NAME"')
        # Imports timm: only for its networks.
        from mae_vit.models.baselines import check_network

        check_network(name)
        return name

    @model_validator(mode="after")
    def _check(self) -> NetworkSection:
        if min(self.image_hw) <= 0:
            raise ValueError(f"img_size={self.img_size}: needs to be above 0")
        if self.drop_path_rate and self.name in WITHOUT_DROP_PATH:
            raise ValueError(f'drop_path_rate has no effect with name="{self.name}"')
        return self

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return height_width(self.img_size)

    @property
    def channels(self) -> int:
        """Bands of the images. Until the data are known they are taken for photographs."""
        return self.in_chans or PHOTOGRAPH_CHANNELS
