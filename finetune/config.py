"""The config of a fine-tuning run, and how a start's facts enter it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from finetune.probe_options import unused_options
from mae_vit.baselines import TIMM_PREFIX, check_network
from mae_vit.config import (
    Config,
    DataSection,
    ModelSection,
    MonitorSection,
    OptimSection,
    Section,
    TrainSection,
    height_width,
)
from mae_vit.config_file import drop_alternatives
from mae_vit.encoder import SIZES
from mae_vit.errors import InputError
from mae_vit.objectives.classify import HeadInit, Pool
from mae_vit.starts import Start, read_start

# Sections of a config file that are laid over the others where there is a start.
WITH_START = "with_start"
_NETWORKS = ("SimpleCNN", "SmallResNet")
_UNUSED_MONITOR = (
    "evaluate_split",
    "evaluate_images",
    "probe_every_steps",
    "probe_every_epochs",
    "probe_shots",
    "probe_queries",
)


class NetworkSection(Section):
    """A network that is no Vision Transformer of ours: a baseline, or an architecture of timm's."""

    name: str
    img_size: int | list[int]
    in_chans: Literal[1, 3] = 3
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.startswith(TIMM_PREFIX) and name not in _NETWORKS:
            known = ", ".join((*SIZES, *_NETWORKS))
            raise ValueError(f'"{name}" is none of {known} and "{TIMM_PREFIX}NAME"')
        check_network(name)
        return name

    @model_validator(mode="after")
    def _check(self) -> NetworkSection:
        if min(self.image_hw) <= 0:
            raise ValueError(f"img_size={self.img_size}: needs to be above 0")
        if self.drop_path_rate and self.name in _NETWORKS:
            raise ValueError(f'drop_path_rate has no effect with name="{self.name}"')
        return self

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return height_width(self.img_size)


def _kind_of(raw: Any) -> str:
    name = raw.get("name") if isinstance(raw, dict) else getattr(raw, "name", None)
    return "vit" if name is None or name in SIZES else "network"


class LabeledDataSection(DataSection):
    """Data with labels; `labels_per_class` takes so many of each class, the smaller sets inside the larger."""

    labels_per_class: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_labels(self) -> LabeledDataSection:
        if self.leave_out_per_class is not None:
            raise ValueError("leave_out_per_class is pretraining's: fine-tuning takes labels_per_class")
        return self


class FinetuneOptimSection(OptimSection):
    """The optimizer, with MAE's betas of fine-tuning (Sec. A.1) and layer-wise decay of the rate."""

    layer_decay: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_betas(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("name", "adamw") == "adamw" and raw.get("betas") is None:
            return {**raw, "betas": [0.9, 0.999]}
        return raw


class FinetuneTrainSection(TrainSection):
    """How long and how large; one process trains on plain torch, several on DeepSpeed."""

    engine: Literal["auto", "deepspeed", "torch"] = "auto"  # type: ignore[assignment]


class FinetuneSection(Section):
    """What is done with the start.

    Attributes:
        mode: "finetune" trains everything; "few_shot" and "knn" score frozen features in closed
            form, without anything of `optim`, `data.augment` and the length of training;
            "linear_probe" trains one layer on frozen features, by `optim` and `train`.
        start: the weights begun from; --ckpt sets it.
        pool: [CLS] behind the final norm, or the mean of the patch tokens.
        head_init: "zero" (ViT Sec. 3.2), or "small": normal of std 2e-5 (official MAE code).
        label_smoothing: of the training loss.
        holdout: share of the labeled images that is not trained on and chooses the epoch, of a
            linear probe the rate; 0 trains on all and takes the last weights.
        test: measure on the test split, once, at the end; false to choose settings by held-out images.
        test_split: "test" if there is one, else "val".
        train_images: most training images that `train_top1` is measured on.
        shots: images of each class, of the mode "few_shot".
        draws: how often they are drawn.
        neighbors: of the mode "knn".
        lr_factors: of the rate, that the mode "linear_probe" tries.
    """

    mode: Literal["finetune", "few_shot", "knn", "linear_probe"] = "finetune"
    start: str | None = None
    pool: Pool = "cls"
    head_init: HeadInit = "zero"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    holdout: float = Field(default=0.1, ge=0, le=0.5)
    test: bool = True
    test_split: str | None = None
    train_images: int = Field(default=10_000, gt=0)
    # ViT Sec. 4.1 has five and ten.
    shots: list[int] = Field(default=[1, 5, 10, 25], min_length=1)
    draws: int = Field(default=5, gt=0)
    neighbors: int = Field(default=20, gt=0)
    # Ours: a rate that suits one encoder's features is another's ten times over; MAE has one.
    lr_factors: list[float] = Field(default=[0.1, 0.3, 1.0, 3.0, 10.0], min_length=1)

    @model_validator(mode="after")
    def _check(self) -> FinetuneSection:
        if min(self.shots) < 1:
            raise ValueError(f"shots={self.shots}: at least 1 each")
        if min(self.lr_factors) <= 0:
            raise ValueError(f"lr_factors={self.lr_factors}: above 0 each")
        owners = {"shots": "few_shot", "draws": "few_shot", "neighbors": "knn", "lr_factors": "linear_probe"}
        for key, mode in owners.items():
            if self.mode != mode and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f'{key} has no effect with mode="{self.mode}"; it belongs to mode="{mode}"')
        if not self.test and (self.mode in ("few_shot", "knn") or not self.holdout):
            raise ValueError(
                'test=false leaves nothing to measure: it needs mode="finetune" or "linear_probe" and holdout '
                "above 0"
            )
        if self.mode == "linear_probe" and not self.holdout and len(self.lr_factors) > 1:
            raise ValueError(
                f"holdout=0 leaves nothing to choose among lr_factors={self.lr_factors} by: give one of them"
            )
        return self


class FinetuneConfig(Config):
    """A fine-tuning run: the common sections, some of them with more in them."""

    model: Annotated[  # type: ignore[assignment]
        Annotated[ModelSection, Tag("vit")] | Annotated[NetworkSection, Tag("network")],
        Discriminator(_kind_of),
    ]
    data: LabeledDataSection
    optim: FinetuneOptimSection
    train: FinetuneTrainSection
    finetune: FinetuneSection = FinetuneSection()

    @model_validator(mode="after")
    def _check_finetune(self) -> FinetuneConfig:
        if isinstance(self.model, ModelSection):
            if self.model.init is not None:
                raise ValueError("model.init is pretraining's: give weights to begin from by --ckpt")
        else:
            self._check_network()
        unused = MonitorSection()
        for name in _UNUSED_MONITOR:
            if getattr(self.monitor, name) != getattr(unused, name):
                raise ValueError(
                    f"monitor.{name} has no effect in fine-tuning, which measures all of finetune.holdout"
                )
        if self.finetune.mode == "linear_probe":
            self._check_probe()
        return self

    def _check_probe(self) -> None:
        if unused := unused_options(self):
            raise ValueError(
                f'{", ".join(unused)}: no effect with finetune.mode="linear_probe", which encodes each image once, '
                "as it is, and trains one layer (see configs/linear_probe_base.yaml)"
            )
        if self.train.effective_batch_size < 2:
            raise ValueError(
                "train.effective_batch_size=1: the norm of a linear probe needs 2 images or more"
            )

    def _check_network(self) -> None:
        """A network begins from scratch, and has its own read-out and head."""
        name, own = self.model.name, FinetuneSection()
        if self.finetune.start is not None:
            raise ValueError(
                f'model.name="{name}" begins from scratch, --ckpt {self.finetune.start} does not fit it'
            )
        if self.finetune.mode != "finetune":
            raise ValueError(f'finetune.mode="{self.finetune.mode}" needs a Vision Transformer, not "{name}"')
        for key in ("pool", "head_init"):
            if getattr(self.finetune, key) != getattr(own, key):
                raise ValueError(f'finetune.{key} has no effect with model.name="{name}"')
        if self.optim.layer_decay is not None:
            raise ValueError(f'optim.layer_decay has no effect with model.name="{name}"')

    def on(self, world_size: int) -> FinetuneConfig:
        """Returns the config with the engine chosen for so many ranks."""
        if self.train.engine != "auto":
            return self
        alone = world_size == 1 and self.train.zero_stage == 0
        train = self.train.model_copy(update={"engine": "torch" if alone else "deepspeed"})
        return self.model_copy(update={"train": train})


class StartAmendment:
    """Lays a start's facts over what a config file says; overrides come after it.

    First the file's section `with_start`, then the encoder's geometry and the
    normalization that the start was trained with; `replaced` tells what else the file
    said, (its value, the start's) by key. The size of images is the file's, where it
    gives one.
    """

    def __init__(self, ckpt: str | None, stem: str, overrides: Sequence[str] = ()) -> None:
        """Remembers --ckpt, and what names the run: the config, and a mode among the overrides.

        Raises:
            InputError: if the start is given in a way that does not count.
        """
        if ckpt is not None and not ckpt.strip():
            raise InputError('--ckpt "" names no start: give one, or leave --ckpt out to begin from scratch')
        for text in overrides:
            if text.partition("=")[0] == "finetune.start":
                raise InputError(f'override "{text}": weights to begin from are given by --ckpt')
        modes = [
            text.partition("=")[2].strip("\"' ") for text in overrides if text.startswith("finetune.mode=")
        ]
        self._ckpt, self._name = ckpt, "-".join([stem, *modes[-1:]])
        self.start: Start | None = None
        self.replaced: dict[str, tuple[Any, Any]] = {}

    def __call__(self, raw: dict[str, Any]) -> None:
        """Changes sections as read.

        Raises:
            InputError: if the start cannot be read.
        """
        extra = raw.pop(WITH_START, None) or {}
        section = raw.get("finetune")
        named = self._ckpt or (section.get("start") if isinstance(section, dict) else None)
        run = raw.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", self._name + (f"-{start_name(str(named))}" if named else ""))
        if named is None:
            return
        if not isinstance(extra, dict):
            raise InputError(f"{WITH_START}: a mapping of sections, not {type(extra).__name__}")
        self.start = read_start(str(named))
        _lay_over(raw, extra)
        facts: dict[str, Any] = {"finetune": {"start": str(named)}}
        model = raw.get("model")
        name = model.get("name") if isinstance(model, dict) else None
        if self.start.geometry is not None and (name is None or name in SIZES):
            # As in the official MAE code: a fixed table is where learned positions begin.
            facts["model"] = {**self.start.geometry, "pos_embed": "learnable"}
            if isinstance(model, dict) and "img_size" in model:
                # Positions are interpolated to the size that the recipe asks for.
                del facts["model"]["img_size"]
        if self.start.mean is not None and self.start.std is not None:
            facts["data"] = {"normalize": [list(self.start.mean), list(self.start.std)]}
        self.replaced = {
            f"{section}.{key}": (raw[section][key], value)
            for section in ("model", "data")
            for key, value in facts.get(section, {}).items()
            if isinstance(raw.get(section), dict) and raw[section].get(key, value) != value
        }
        _lay_over(raw, facts)


def start_name(start: str) -> str:
    """A start's name as part of a run's name."""
    path = Path(start.removeprefix(TIMM_PREFIX))
    name = path.parent.name if path.name in ("encoder.safetensors", "model.safetensors") else path.stem
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name) or "start"


def _lay_over(raw: dict[str, Any], extra: Mapping[str, Any]) -> None:
    keys = {f"{section}.{key}" for section, values in extra.items() if values for key in values}
    drop_alternatives(raw, keys)
    for section, values in extra.items():
        below = raw.setdefault(section, {})
        if isinstance(below, dict) and isinstance(values, dict):
            below.update(values)
        else:
            raw[section] = values
