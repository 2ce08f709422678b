"""The config of a fine-tuning run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from mae_vit.config.data import DataSection
from mae_vit.config.schema import Config, MonitorSection, OptimSection
from mae_vit.config.section import Options, Section
from mae_vit.config.typed_yaml import PathText
from mae_vit.finetuning.config.modes import MODES, Mode, ModeName, unused_options
from mae_vit.models.sizes import Pool

HeadInit = Literal["zero", "small"]
# In the schema, but rejected: for pretraining only, or set by --ckpt.
_UNUSED_MONITOR = ("evaluate_images", "probe_queries")
HIDDEN_KEYS = (
    *("model.init", "finetune.start", "data.leave_out_per_class", "data.leave_out_draws"),
    *(f"monitor.{name}" for name in _UNUSED_MONITOR),
)


class LabeledDataSection(DataSection):
    """Data with labels.

    Attributes:
        labels_per_class: number of labeled images of each class; smaller sets are part of larger ones.
    """

    labels_per_class: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_labels(self) -> LabeledDataSection:
        if self.leave_out_per_class is not None:
            raise ValueError("leave_out_per_class is for pretraining; use labels_per_class")
        return self


class FinetuneOptimSection(OptimSection):
    """The optimizer, with the betas of MAE's fine-tuning (Sec. A.1) and layer-wise decay of the learning rate.

    Attributes:
        layer_decay: factor of the learning rate from each layer to the one before.
    """

    options: ClassVar[Options] = {
        "name": {
            **OptimSection.options["name"],
            **{
                name: {**OptimSection.options["name"][name], "betas": [0.9, 0.999]}
                for name in ("adamw", "muon")
            },
        }
    }

    layer_decay: float | None = Field(default=None, gt=0, le=1)


class FinetuneSection(Section):
    """The task on the labels, its head and its evaluation.

    Attributes:
        mode: "finetune" trains the whole network. "linear_probe" trains one layer on frozen features.
            "few_shot" and "knn" score frozen features without training. "segment" trains the whole network on
            masks, "segment_probe" one layer on the frozen patch tokens.
        start: the pretrained weights; --ckpt sets it.
        pool: the feature: [CLS] after the final norm, or the mean of the patch tokens. If neither config nor command
            line gives it, pretrained weights have their own: ours the mean, those of others mostly [CLS].
        head_init: "zero" (ViT Sec. 3.2), or "small": normal with std 2e-5 (official MAE code). A linear probe by LARS
            has std 0.01 (official MAE code).
        label_smoothing: label smoothing of the training loss.
        mixup: alpha of mixup; 0 for none (MAE Sec. A.1: 0.8).
        cutmix: alpha of cutmix; 0 for none (MAE Sec. A.1: 1.0).
        holdout: share of the labeled images that are validation images: kept out of training, they choose the epoch, or
            the learning rate of a linear probe. 0 trains on all images and tests the last weights.
        test: whether to measure on the test split, once, at the end. Set false while you choose settings.
        shots: numbers of images of each class for "few_shot".
        draws: how often "few_shot" draws these images.
        neighbors: number of neighbors for "knn".
        lr_factors: factors of the learning rate that "linear_probe" tries.
    """

    options: ClassVar[Options] = {"mode": {name: mode.options for name, mode in MODES.items()}}

    mode: ModeName = "finetune"
    start: PathText | None = None
    pool: Pool = "mean"
    head_init: HeadInit = "zero"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    mixup: float = Field(default=0.0, ge=0)
    cutmix: float = Field(default=0.0, ge=0)
    holdout: float = Field(default=0.1, ge=0, le=0.5)
    test: bool = True
    # ViT Sec. 4.1 has five and ten.
    shots: list[int] = Field(default=[1, 5, 10, 25], min_length=1)
    draws: int = Field(default=5, gt=0)
    neighbors: int = Field(default=20, gt=0)
    # Ours: the best rates for two encoders' features may differ tenfold; MAE has one rate.
    lr_factors: list[float] = Field(default=[0.1, 0.3, 1.0, 3.0, 10.0], min_length=1)

    @model_validator(mode="after")
    def _check(self) -> FinetuneSection:
        if min(self.shots) < 1:
            raise ValueError(f"shots={self.shots}: each must be at least 1")
        if min(self.lr_factors) <= 0:
            raise ValueError(f"lr_factors={self.lr_factors}: each must be above 0")
        if not self.test and (MODES[self.mode].trains == "nothing" or not self.holdout):
            raise ValueError(
                "test=false leaves nothing to measure; it needs a mode that trains and holdout above 0"
            )
        if self.mode == "linear_probe" and not self.holdout and len(self.lr_factors) > 1:
            raise ValueError(
                f"holdout=0 leaves no images to choose one of lr_factors={self.lr_factors}; give only one"
            )
        return self


class FinetuneConfig(Config):
    """A fine-tuning run: the common sections, some of them with more in them."""

    measured_on: ClassVar[str] = "validation images"

    data: LabeledDataSection
    optim: FinetuneOptimSection
    finetune: FinetuneSection = FinetuneSection()

    @property
    def mode(self) -> Mode:
        """The mode that `finetune.mode` names."""
        return MODES[self.finetune.mode]

    @model_validator(mode="after")
    def _check_finetune(self) -> FinetuneConfig:
        if self.model.init is not None:
            raise ValueError("model.init is for pretraining; give pretrained weights with --ckpt")
        if self.model.family == "network":
            self._check_network()
        unused = MonitorSection()
        for name in _UNUSED_MONITOR:
            if getattr(self.monitor, name) != getattr(unused, name):
                raise ValueError(
                    f"monitor.{name} has no effect in fine-tuning, which measures all of finetune.holdout"
                )
        if self.data.label_draw and self.data.labels_per_class is None and not self.finetune.holdout:
            raise ValueError(
                "data.label_draw has no effect without data.labels_per_class and finetune.holdout"
            )
        if self.finetune.mode == "linear_probe" and (ignored := unused_options(self, self.mode)):
            raise ValueError(
                'finetune.mode="linear_probe" trains one layer on fixed features, and takes no '
                f"{', '.join(ignored)}; leave that out (the config linear_probe_cifar_tiny has none of it)"
            )
        if self.mode.trains == "head" and self.optim.name == "lars" and self.finetune.head_init != "zero":
            raise ValueError("finetune.head_init has no effect on a probe with optim.name=lars; leave it out")
        if self.mode.trains == "head" and self.optim.name == "muon":
            raise ValueError(
                "optim.name=muon is for transformer blocks, which a probe does not train; use adamw"
            )
        if self.mode.labels == "mask":
            self._check_segmentation()
        return self

    def _check_segmentation(self) -> None:
        """Rejects options that move pixels without their mask, or mix images."""
        mode, finetune, augment = self.finetune.mode, self.finetune, self.data.augment
        refused = {
            "finetune.mixup": finetune.mixup,
            "finetune.cutmix": finetune.cutmix,
            "data.augment.erasing": augment.erasing,
            "data.augment.policy": augment.policy if augment.policy not in ("none", "color") else None,
        }
        for key, value in refused.items():
            if value:
                raise ValueError(f'{key}={value} changes images, not masks; leave it out with mode="{mode}"')

    def _check_network(self) -> None:
        """Checks a network with its own pooling and head."""
        name, mode, weights = self.model.name, self.finetune.mode, self.finetune.start
        if self.mode.trains != "all" and weights is None:
            raise ValueError(f'finetune.mode="{mode}" needs a Vision Transformer, not "{name}"')
        if self.mode.trains == "all" and self.finetune.head_init != FinetuneSection().head_init:
            raise ValueError(f'finetune.head_init has no effect with model.name="{name}"')
        if self.finetune.pool != "mean":
            raise ValueError(f'finetune.pool="cls" has no effect with model.name="{name}"; leave it out')
