"""The sections of a run's configuration: frozen, strictly typed, unknown keys forbidden.

`mae_vit.config_file` reads them from YAML; values derived from them (learning rate,
steps) live in `mae_vit.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A part of the configuration: frozen, strictly typed, unknown keys forbidden."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def exactly_one(section: BaseModel, names: Sequence[str], *, required: bool) -> None:
    """Raises ValueError unless exactly one (or, if not required, at most one) is given."""
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(names)}, not {' and '.join(given)}")
    if required and not given:
        raise ValueError(f"give one of {', '.join(names)}")


class RunSection(Section):
    """What the run is called, where it lives, and its seed."""

    name: str
    dir: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    deterministic: bool = False

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, name: Any) -> Any:
        # Empty, it is a slip as well: `run.name=$NAME`.
        if name is None or (isinstance(name, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)):
            raise ValueError("letters, digits, . _ - (a letter or digit first); a folder goes in run.dir")
        return name


class ModelSection(Section):
    """The encoder; `name` sets width, depth and heads, which may be given apart."""

    name: Literal["tiny-cifar", "Ti", "S", "B", "L", "H"]
    img_size: int | list[int]
    patch_size: int = Field(gt=0)
    in_chans: Literal[1, 3] = 3
    embed_dim: int | None = Field(default=None, gt=0)
    depth: int | None = Field(default=None, gt=0)
    num_heads: int | None = Field(default=None, gt=0)
    mlp_ratio: float = Field(default=4.0, gt=0)
    pos_embed: Literal["learnable", "sincos"] = "learnable"
    init: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if isinstance(self.img_size, list) and len(self.img_size) != 2:
            raise ValueError(f"img_size={self.img_size}: give one number or [height, width]")
        for side in self.image_hw:
            if side <= 0 or side % self.patch_size:
                near = max(1, round(side / self.patch_size)) * self.patch_size
                raise ValueError(
                    f"patch_size={self.patch_size} does not divide img_size={self.img_size} "
                    f"(nearest side that fits: {near})"
                )
        num_patches = (self.image_hw[0] // self.patch_size) * (self.image_hw[1] // self.patch_size)
        if num_patches > 2**16:  # masks number patches by 16 bits
            raise ValueError(f"patch_size={self.patch_size} makes {num_patches} patches: at most {2**16}")
        return self

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width in pixels."""
        if isinstance(self.img_size, int):
            return self.img_size, self.img_size
        return self.img_size[0], self.img_size[1]


# MAE Sec. A.1 crops 20 to 100 % of the area; torchvision's shapes; CIFAR's usual shift.
_CROP_OPTIONS: dict[str, dict[str, Any]] = {
    "pad": {"pad_px": 4},
    "random_resized": {"scale": [0.2, 1.0], "ratio": [3 / 4, 4 / 3]},
}


class AugmentSection(Section):
    """Keyed augmentation; the same sample gets the same crop whoever computes it."""

    crop: Literal["none", "pad", "random_resized"] = "none"
    pad_px: int | None = Field(default=None, gt=0)
    scale: list[float] | None = Field(default=None, min_length=2, max_length=2)
    ratio: list[float] | None = Field(default=None, min_length=2, max_length=2)
    flip: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """Each crop has its own options; those of the others stay unset."""
        if not isinstance(raw, dict):
            return raw
        defaults = _CROP_OPTIONS.get(str(raw.get("crop")), {})
        return {**raw, **{name: value for name, value in defaults.items() if raw.get(name) is None}}

    @model_validator(mode="after")
    def _check(self) -> AugmentSection:
        for crop, options in _CROP_OPTIONS.items():
            for name in options:
                if crop != self.crop and getattr(self, name) is not None:
                    raise ValueError(
                        f'{name} has no effect with crop="{self.crop}"; it belongs to crop="{crop}"'
                    )
        if self.scale and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale}: needs 0 < low <= high <= 1 (shares of the image's area)")
        if self.ratio and not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio}: needs 0 < low <= high (width over height)")
        return self


class DataSection(Section):
    """Where images come from and how they reach the model."""

    path: str
    split: str = "train"
    source: Literal["auto", "memory", "tar"] = "auto"
    order: Literal["global"] = "global"
    workers: int | Literal["auto"] = "auto"
    memory_limit_gib: float = Field(default=4.0, gt=0)
    normalize: Literal["dataset", "imagenet", "half"] | list[list[float]] = "dataset"
    augment: AugmentSection = AugmentSection()

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if isinstance(self.workers, int) and not 0 <= self.workers <= 512:
            raise ValueError(f"workers={self.workers}: 0 to 512")
        return self


class OptimSection(Section):
    """The optimizer; `blr` is the rate per 256 samples of effective batch (MAE Sec. A.1)."""

    name: Literal["adamw"] = "adamw"
    blr: float | None = Field(default=None, gt=0)
    lr: float | None = Field(default=None, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)
    clip_grad: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        exactly_one(self, ("blr", "lr"), required=True)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each needs 0 <= beta < 1")
        return self


class TrainSection(Section):
    """How long, how large a batch, in which precision, on which engine."""

    steps: int | None = Field(default=None, gt=0)
    epochs: float | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_epochs: float | None = Field(default=None, ge=0)
    warmup_samples: int | None = Field(default=None, ge=0)
    effective_batch_size: int = Field(gt=0)
    batch_size_per_device: int | None = Field(default=None, gt=0)
    precision: Literal["fp32", "bf16"] = "bf16"
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: Literal[0, 1] = 0
    compile: bool = False

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        exactly_one(self, ("steps", "epochs", "samples"), required=True)
        exactly_one(self, ("warmup_steps", "warmup_epochs", "warmup_samples"), required=False)
        if self.engine == "torch" and self.zero_stage:
            raise ValueError(f'zero_stage={self.zero_stage} needs engine="deepspeed"')
        return self


class CheckpointSection(Section):
    """When to save and what to keep: the last K, and every M-th of those saved."""

    every_steps: int | None = Field(default=None, gt=0)
    every_epochs: float | None = Field(default=None, gt=0)
    keep_last: int = Field(default=2, gt=0)
    keep_every: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> CheckpointSection:
        exactly_one(self, ("every_steps", "every_epochs"), required=False)
        return self


class MonitorSection(Section):
    """What is logged, and how often."""

    log_every_steps: int = Field(default=20, gt=0)
    evaluate_every_steps: int | None = Field(default=None, gt=0)
    evaluate_every_epochs: float | None = Field(default=None, gt=0)
    evaluate_split: str | None = None
    evaluate_images: int = Field(default=512, gt=0)
    picture_images: int = Field(default=8, gt=0, le=64)
    probe_every_steps: int | None = Field(default=None, gt=0)
    probe_every_epochs: float | None = Field(default=None, gt=0)
    probe_shots: int = Field(default=25, gt=0)
    probe_queries: int = Field(default=500, ge=0)
    tensorboard: bool = True

    @model_validator(mode="after")
    def _check(self) -> MonitorSection:
        exactly_one(self, ("evaluate_every_steps", "evaluate_every_epochs"), required=False)
        exactly_one(self, ("probe_every_steps", "probe_every_epochs"), required=False)
        return self


class Config(Section):
    """The sections that every training run has."""

    run: RunSection
    model: ModelSection
    data: DataSection
    optim: OptimSection
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = MonitorSection()
