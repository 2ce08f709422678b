"""The sections of a run's configuration: frozen, strictly typed, unknown keys forbidden.

`mae_vit.config_file` reads them from YAML; values derived from them (learning rate,
steps) live in `mae_vit.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mae_vit.data.remote.urls import is_url


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


def _refuse_foreign(section: BaseModel, choices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Raises ValueError for an option that belongs to another choice of a key than the one made.

    Args:
        section: a config section, checked.
        choices: by key, the options of each of its choices.
    """
    for key, kinds in choices.items():
        choice = getattr(section, key)
        for option in dict.fromkeys(option for options in kinds.values() for option in options):
            if option not in kinds.get(choice, {}) and getattr(section, option) is not None:
                owners = " or ".join(f'"{name}"' for name, options in kinds.items() if option in options)
                raise ValueError(
                    f'{option} has no effect with {key}="{choice}"; it belongs to {key}={owners}'
                )


def height_width(img_size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width in pixels, of one number or of [height, width].

    Raises:
        ValueError: for a list of another length.
    """
    sides = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
    if len(sides) != 2:
        raise ValueError(f"img_size={img_size}: give one number or [height, width]")
    return sides[0], sides[1]


class RunSection(Section):
    """What the run is called, where it lives, and its seed.

    A rank that stands still for `hang_timeout_s` in a step (four times as long in an evaluation
    or a save) is killed, so that the others do not wait for it for ever; null waits.
    """

    name: str
    dir: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    deterministic: bool = False
    # The first step compiles, for minutes; ours.
    hang_timeout_s: float | None = Field(default=900.0, gt=0)

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
    drop_rate: float = Field(default=0.0, ge=0, lt=1)
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)
    init: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
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
        return height_width(self.img_size)


# MAE Sec. A.1 crops 20 to 100 % of the area; torchvision's shapes; CIFAR's usual shift.
_CROP_OPTIONS: dict[str, dict[str, Any]] = {
    "pad": {"pad_px": 4},
    "random_resized": {"scale": [0.2, 1.0], "ratio": [3 / 4, 4 / 3]},
}
# MAE's fine-tuning (Sec. A.1: RandAugment "9, 0.5"), timm's rand-m9-mstd0.5-inc1.
_POLICY_OPTIONS: dict[str, dict[str, Any]] = {
    "randaugment": {"num_ops": 2, "magnitude": 9.0, "magnitude_std": 0.5},
}


class AugmentSection(Section):
    """Keyed augmentation; the same sample gets the same crop whoever computes it."""

    crop: Literal["none", "pad", "random_resized"] = "none"
    pad_px: int | None = Field(default=None, gt=0)
    scale: list[float] | None = Field(default=None, min_length=2, max_length=2)
    ratio: list[float] | None = Field(default=None, min_length=2, max_length=2)
    flip: bool = True
    policy: Literal["none", "randaugment", "autoaugment_cifar"] = "none"
    num_ops: int | None = Field(default=None, gt=0)
    magnitude: float | None = Field(default=None, ge=0, le=10)
    magnitude_std: float | None = Field(default=None, ge=0)
    erasing: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """Each crop and policy has its own options; those of the others stay unset."""
        if not isinstance(raw, dict):
            return raw
        defaults = {
            **_CROP_OPTIONS.get(str(raw.get("crop")), {}),
            **_POLICY_OPTIONS.get(str(raw.get("policy")), {}),
        }
        return {**raw, **{name: value for name, value in defaults.items() if raw.get(name) is None}}

    @model_validator(mode="after")
    def _check(self) -> AugmentSection:
        _refuse_foreign(self, {"crop": _CROP_OPTIONS, "policy": _POLICY_OPTIONS})
        if self.scale and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale}: needs 0 < low <= high <= 1 (shares of the image's area)")
        if self.ratio and not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio}: needs 0 < low <= high (width over height)")
        return self

    @property
    def view_options(self) -> dict[str, Any]:
        """All of it, as `mae_vit.data.opening.make_views` takes it."""
        options = {name: getattr(self, name) for name in ("crop", "flip", "erasing", "policy")}
        options["policy_options"] = {
            name: getattr(self, name) for name in _POLICY_OPTIONS.get(self.policy, {})
        }
        for name in _CROP_OPTIONS.get(self.crop, {}):
            value = getattr(self, name)
            options[name] = tuple(value) if isinstance(value, list) else value
        return options


# Eight lanes suit the ranks of a usual node, and any power of two of them. Every step
# then draws from 8 x 4 shards: 320,000 samples at 10,000 a shard, where webdataset's
# examples shuffle within 1,000 to 5,000.
_BLOCKS_OPTIONS = {"lanes": 8, "block_shards": 4}


class DataSection(Section):
    """Where images come from, in which order, and how they reach the model.

    `order="global"` permutes all samples; with "blocks" a rank reads only the shards of
    its lanes, a few at a time (`mae_vit.data.blocks`). `leave_out_per_class=N` trains on the
    images that fine-tuning's `data.labels_per_class=N` does not take: a start that has seen
    labels, and is to be fine-tuned on a part of the same data, must not have seen that part's.
    `damage_budget` is the share of the training samples that may turn out damaged before the
    run stops; others take their places. 0 stops at the first. Of a `path` that is a URL the
    shards come into `cache_dir` (null: the user's cache folder), at most `cache_gib` of them
    (null: 50).
    """

    path: str
    cache_dir: str | None = None
    cache_gib: float | None = Field(default=None, gt=0)
    split: str = "train"
    source: Literal["auto", "memory", "tar"] = "auto"
    order: Literal["global", "blocks"] = "global"
    lanes: int | None = Field(default=None, gt=0, le=65536)
    block_shards: int | None = Field(default=None, gt=0, le=65536)
    workers: int | Literal["auto"] = "auto"
    memory_limit_gib: float = Field(default=4.0, gt=0)
    normalize: Literal["dataset", "imagenet", "half"] | list[list[float]] = "dataset"
    leave_out_per_class: int | None = Field(default=None, gt=0)
    damage_budget: float = Field(default=0.001, ge=0, lt=1)
    augment: AugmentSection = AugmentSection()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """The options of "blocks" have values only there."""
        if not isinstance(raw, dict) or raw.get("order") != "blocks":
            return raw
        return {**raw, **{name: value for name, value in _BLOCKS_OPTIONS.items() if raw.get(name) is None}}

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        _refuse_foreign(self, {"order": {"blocks": _BLOCKS_OPTIONS}})
        for name in ("cache_dir", "cache_gib"):
            if getattr(self, name) is not None and not is_url(self.path):
                raise ValueError(f"{name} has no effect with a path that is no URL")
        if isinstance(self.workers, int) and not 0 <= self.workers <= 512:
            raise ValueError(f"workers={self.workers}: 0 to 512")
        return self


# Each optimizer's own options and their values: AdamW from MAE Sec. A.1; Adam and the
# momentum of SGD from ViT Sec. 4.1; LARS from MAE's linear probe (Sec. A.1).
_OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": [0.9, 0.95], "eps": 1e-8},
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "lars": {"momentum": 0.9, "trust_coefficient": 0.001},
}
# From the same places, but for Adam: ViT's decay of 0.1 is decoupled in its authors' code,
# which is `adamw` with betas 0.9 / 0.999 here; as an L2 term it would be another thing.
_WEIGHT_DECAY = {"adamw": 0.05, "adam": 0.0, "sgd": 0.0, "lars": 0.0}
# arXiv 2405.18392 Sec. 4: a fifth of the run reaches what a cosine does.
_SCHEDULE_OPTIONS: dict[str, dict[str, Any]] = {"cosine": {}, "linear": {}, "wsd": {"decay_share": 0.2}}


# Keys that choose among ways, and the options of each way. An override of the key takes the
# place of the file's options of the other ways.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "data.order": {"blocks": _BLOCKS_OPTIONS},
    "data.augment.crop": _CROP_OPTIONS,
    "data.augment.policy": _POLICY_OPTIONS,
    "optim.name": _OPTIMIZER_OPTIONS,
    "optim.schedule": _SCHEDULE_OPTIONS,
}


class OptimSection(Section):
    """The optimizer; `blr` is the rate per 256 samples of effective batch (MAE Sec. A.1)."""

    name: Literal["adamw", "adam", "sgd", "lars"] = "adamw"
    blr: float | None = Field(default=None, gt=0)
    lr: float | None = Field(default=None, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_share: float | None = Field(default=None, gt=0, le=1)
    betas: list[float] | None = Field(default=None, min_length=2, max_length=2)
    eps: float | None = Field(default=None, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    nesterov: bool | None = None
    trust_coefficient: float | None = Field(default=None, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)
    clip_grad: float | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """Each optimizer and schedule has its own options; those of the others stay unset."""
        if not isinstance(raw, dict):
            return raw
        name = str(raw.get("name", "adamw"))
        defaults = {
            **_OPTIMIZER_OPTIONS.get(name, {}),
            **_SCHEDULE_OPTIONS.get(str(raw.get("schedule", "cosine")), {}),
            **({"weight_decay": _WEIGHT_DECAY[name]} if name in _WEIGHT_DECAY else {}),
        }
        return {**raw, **{key: value for key, value in defaults.items() if raw.get(key) is None}}

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        exactly_one(self, ("blr", "lr"), required=True)
        _refuse_foreign(self, {"name": _OPTIMIZER_OPTIONS, "schedule": _SCHEDULE_OPTIONS})
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each needs 0 <= beta < 1")
        if self.nesterov and not self.momentum:
            raise ValueError(f"nesterov=true has no effect with momentum={self.momentum}")
        return self

    @property
    def own_options(self) -> dict[str, Any]:
        """The options that belong to this optimizer alone."""
        return {option: getattr(self, option) for option in _OPTIMIZER_OPTIONS[self.name]}


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
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 0
    compile: bool = False
    activation_checkpointing: bool = False
    # What is measured and exported is then the average (ViT Sec. 4.1; MAE Table 11 has 0.9999).
    ema_decay: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        exactly_one(self, ("steps", "epochs", "samples"), required=True)
        exactly_one(self, ("warmup_steps", "warmup_epochs", "warmup_samples"), required=False)
        if self.engine == "torch" and self.zero_stage:
            raise ValueError(f'zero_stage={self.zero_stage} needs engine="deepspeed"')
        if self.ema_decay is not None and self.zero_stage == 3:
            raise ValueError("ema_decay averages whole weights, zero_stage=3 shards them: use zero_stage=2")
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile=true does not go with zero_stage=3 (most that does: zero_stage=2)")
        return self


class CheckpointSection(Section):
    """When to save and what to keep: the last K, and every M-th of those saved.

    Saves are written beside training; the run stops after `max_failed_saves` in a row.
    """

    every_steps: int | None = Field(default=None, gt=0)
    every_epochs: float | None = Field(default=None, gt=0)
    keep_last: int = Field(default=2, gt=0)
    keep_every: int | None = Field(default=None, gt=0)
    asynchronous: bool = True
    max_failed_saves: int = Field(default=3, gt=0)

    @model_validator(mode="after")
    def _check(self) -> CheckpointSection:
        exactly_one(self, ("every_steps", "every_epochs"), required=False)
        return self


class GuardSection(Section):
    """What is done about steps that are not finite, and losses that leap and stay high.

    All ranks go back to the last checkpoint before such a step, and on past the data that led
    to it: `skip_steps` steps, twice as many at each further try; `max_rollbacks` times from one
    checkpoint, then the run stops. A spike is a loss `spike_sigmas` robust standard deviations
    above the median of the last 256, `spike_steps` steps in a row; null sees none.
    """

    max_rollbacks: int = Field(default=3, ge=0)
    # The idea is PaLM's (arXiv 2204.02311 Sec. 5.1), which skipped 200 to 500 batches; the figures are ours.
    skip_steps: int = Field(default=16, gt=0)
    spike_sigmas: float | None = Field(default=12.0, gt=0)
    spike_steps: int = Field(default=8, gt=0)


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
    probe_shots: int | None = Field(default=None, gt=0)
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
    guard: GuardSection = GuardSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="after")
    def _check_lanes(self) -> Config:
        lanes, batch = self.data.lanes, self.train.effective_batch_size
        if lanes is not None and batch % lanes:
            raise ValueError(
                f"data.lanes={lanes} does not divide train.effective_batch_size={batch} (nearest batch: "
                f"{max(1, round(batch / lanes)) * lanes}, nearest lanes: {fitting_lanes(lanes, batch)})"
            )
        return self

    @model_validator(mode="after")
    def _check_sharding(self) -> Config:
        if self.optim.name == "lars" and self.train.zero_stage:
            raise ValueError(
                f'optim.name="lars" needs whole parameters, train.zero_stage={self.train.zero_stage} '
                "shards them: use zero_stage=0"
            )
        return self


def fitting_lanes(lanes: int, batch: int, world_size: int = 1) -> int:
    """Returns the nearest number of lanes that divides the batch and divides, or is divided by, the ranks."""

    def fits(number: int) -> bool:
        return number > 0 and batch % number == 0 and lanes_fit(number, world_size)

    # Ends at 1 at the latest, which fits all.
    return next(lanes + way for away in range(lanes) for way in (-away, away) if fits(lanes + way))


def lanes_fit(lanes: int, world_size: int) -> bool:
    """Whether each rank has whole lanes, or each lane whole ranks."""
    return lanes % world_size == 0 or world_size % lanes == 0
