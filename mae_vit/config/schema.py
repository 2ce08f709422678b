"""The sections that the config of every training run has.

`mae_vit.config.load` reads them from YAML. `mae_vit.config.plan` derives values from them, such as
learning rate and steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mae_vit.config.data import DataSection, fitting_lanes
from mae_vit.config.encoders import EncoderConfig
from mae_vit.config.section import Options, Section, exactly_one
from mae_vit.config.typed_yaml import PathText
from mae_vit.core.messages import GPUS, nearest

if TYPE_CHECKING:  # imports torch
    from mae_vit.runtime.ranks import Ranks


class OptimSection(Section):
    """The optimizer and its learning rate: a linear warm-up, then half a cosine (MAE Sec. A.1).

    Attributes:
        name: optimizer; `muon` takes query, key and value weights as one matrix, as timm stores them.
        blr: learning rate per 256 samples of effective batch (MAE Sec. A.1); give either `blr` or `lr`.
        lr: peak learning rate.
        min_lr: learning rate at the end.
        betas: decays of the moments of `adamw` and `adam`, and of `muon` beside the matrices of blocks (null:
            [0.9, 0.95] in pretraining with `adamw` and `muon`, else [0.9, 0.999]).
        momentum: momentum of `sgd` and `lars` (null: 0.9) and of `muon` (null: 0.95).
        weight_decay: weight decay; decoupled for `adamw` and `muon`; by default 0.0 for `adam`, `sgd` and `lars`.
        clip_grad: largest norm of the gradient; larger ones are clipped.
    """

    # AdamW: MAE Sec. A.1. Adam and the momentum of SGD: ViT Sec. 4.1. LARS: MAE's linear probe (Sec. A.1). ViT's decay
    # of 0.1 for Adam is decoupled in its authors' code, which is `adamw` with betas 0.9 / 0.999 here. As an L2 term
    # it would have another effect.
    options: ClassVar[Options] = {
        "name": {
            "adamw": {"betas": [0.9, 0.95], "weight_decay": 0.05},
            "adam": {"betas": [0.9, 0.999], "weight_decay": 0.0},
            "sgd": {"momentum": 0.9, "weight_decay": 0.0},
            "lars": {"momentum": 0.9, "weight_decay": 0.0},
            # The momentum of its authors, and MAE's others.
            "muon": {"betas": [0.9, 0.95], "momentum": 0.95, "weight_decay": 0.05},
        }
    }

    name: Literal["adamw", "adam", "sgd", "lars", "muon"] = "adamw"
    blr: float | None = Field(default=None, gt=0)
    lr: float | None = Field(default=None, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    betas: list[float] | None = Field(default=None, min_length=2, max_length=2)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    clip_grad: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        exactly_one(self, ("blr", "lr"), required=True)
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be at least 0 and below 1")
        return self


_HOME = "mae_vit.training.outputs.experiments"
# Each takes a `TrackedRun` and returns a `Tracker` (mae_vit/training/outputs/trackers.py). "module:Class" is
# imported when a run opens it.
TRACKERS: dict[str, str | Callable[[Any], Any]] = {
    "wandb": f"{_HOME}:WandbTracker",
    "mlflow": f"{_HOME}:MlflowTracker",
}


def register_tracker(name: str, tracker: str | Callable[[Any], Any]) -> None:
    """Adds an experiment tracker; raises ValueError if there is another of that name. For plug-ins."""
    if TRACKERS.setdefault(name, tracker) is not tracker:
        raise ValueError(f'there is already a tracker "{name}"; choose another name')


class RunSection(Section):
    """Name, folder, seed and device of the run.

    Attributes:
        name: name of the run; its folder is `runs/NAME`.
        dir: the run's folder, in place of `runs/NAME`; or its URL, such as s3://BUCKET/NAME.
        seed: seed of all random choices.
        device: `auto` takes GPUs where there are any, `cpu` none.
        deterministic: use deterministic kernels; needed on GPUs for identical results.
        hang_timeout_s: seconds without progress in a step after which a rank is killed, so that the others do not wait
            forever. An evaluation or a save may take four times as long. null never kills.
        plugins: modules of your own that add encoders, objectives, augmentation, data or trackers, by name or as files
            that end in .py.
        plugins_may_change: lets a run resume with plug-ins whose source has changed.
    """

    name: str
    dir: PathText | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: Literal["auto", "cpu"] = "auto"
    deterministic: bool = False
    # Our value. It must be longer than the first step, which may compile for minutes.
    hang_timeout_s: float | None = Field(default=900.0, gt=0)
    plugins: list[str] = Field(default_factory=list)
    plugins_may_change: bool = False

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, device: Any) -> Any:
        if isinstance(device, str) and re.match("cuda|gpu", device.lower()):
            raise ValueError(GPUS)
        return device

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, name: Any) -> Any:
        # Refuse an empty name too: it comes from an unset variable, as in `run.name=$NAME`.
        if name is None or (isinstance(name, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)):
            raise ValueError(
                "may have letters, digits, . _ - (a letter or digit first); for a folder use run.dir"
            )
        return name


class TrainSection(Section):
    """Length, batch size, precision and engine.

    Attributes:
        steps: length in steps; give one of `steps`, `epochs` and `samples`.
        epochs: length in epochs.
        samples: length in images.
        warmup_steps: warm-up in steps.
        warmup_epochs: warm-up in epochs.
        warmup_samples: warm-up in images.
        effective_batch_size: images of a step, over all ranks and micro-batches.
        batch_size_per_device: images of a micro-batch on each rank.
        precision: "auto" is bf16 on GPUs and processors that have it, else fp32; the plan shows which, and why. A run
            resumes in the precision that it began with, on any machine. "fp32" is float32 throughout, without TF32.
        engine: "auto" uses DeepSpeed for several processes of the `deepspeed` launcher, or if `zero_stage` is above 0;
            else "torch", which uses DistributedDataParallel for several processes (torchrun, srun).
        zero_stage: ZeRO stage of DeepSpeed.
        compile: use torch.compile. "auto" compiles Vision Transformers and our small CNNs on a GPU if the run is long
            enough to save more time than it takes, as CUDA graphs if launching kernels takes most of a step; the plan
            (`--dry-run`) shows the times. It never does on CPUs: compiled losses differ by rounding.
        attention: the kernel of attention in training. "auto" is plain products on CPUs, and PyTorch's choice on GPUs;
            "cudnn", "flash" and "efficient" name one of PyTorch's.
        activation_checkpointing: compute activations again in the backward pass: less memory, more time.
        ema_decay: decay of an average of the weights (EMA), which the run then evaluates and exports (ViT Sec. 4.1; MAE
            Table 11 uses 0.9999). The n-th update uses at most (1 + n) / (10 + n).
    """

    steps: int | None = Field(default=None, gt=0)
    epochs: float | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_epochs: float | None = Field(default=None, ge=0)
    warmup_samples: int | None = Field(default=None, ge=0)
    effective_batch_size: int = Field(gt=0)
    batch_size_per_device: int | None = Field(default=None, gt=0)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    engine: Literal["auto", "deepspeed", "torch"] = "auto"
    zero_stage: Literal[0, 1, 2, 3] = 0
    compile: bool | Literal["auto"] = "auto"
    attention: Literal["auto", "plain", "cudnn", "flash", "efficient"] = "auto"
    activation_checkpointing: bool = False
    ema_decay: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        exactly_one(self, ("steps", "epochs", "samples"), required=True)
        exactly_one(self, ("warmup_steps", "warmup_epochs", "warmup_samples"), required=False)
        if (self.engine == "deepspeed" or self.zero_stage) and find_spec("deepspeed") is None:
            raise ValueError('deepspeed is not installed (it needs Linux); use engine="torch", zero_stage=0')
        if self.engine == "torch" and self.zero_stage:
            raise ValueError(f'zero_stage={self.zero_stage} needs engine="deepspeed"')
        if self.ema_decay is not None and self.zero_stage == 3:
            raise ValueError("ema_decay needs whole weights, which zero_stage=3 shards; use zero_stage=2")
        if self.compile is True and self.zero_stage == 3:
            raise ValueError("compile=true does not work with zero_stage=3; use zero_stage=2")
        return self

    def engine_on(self, ranks: Ranks) -> Literal["deepspeed", "torch"]:
        """Returns the engine of a run on these ranks."""
        if self.engine != "auto":
            return self.engine
        # At ZeRO 0 both engines send the same bytes during the backward pass, and torch has less to do on the host.
        return "deepspeed" if self.zero_stage or (ranks.under_deepspeed and ranks.world_size > 1) else "torch"


class CheckpointSection(Section):
    """When to save and what to keep. Without any of the first three keys a run saves at each epoch.

    Attributes:
        every_steps: save after this many steps.
        every_epochs: save after this many epochs.
        every_minutes: also save when so many minutes have passed since the last save, by rank 0's clock, but not during
            a write.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep every N-th checkpoint of those saved by steps or epochs.
        max_failed_saves: failed saves in a row after which the run stops.
    """

    every_steps: int | None = Field(default=None, gt=0)
    every_epochs: float | None = Field(default=None, gt=0)
    every_minutes: float | None = Field(default=None, gt=0)
    keep_last: int = Field(default=2, gt=0)
    keep_every: int | None = Field(default=None, gt=0)
    max_failed_saves: int = Field(default=3, gt=0)

    @model_validator(mode="after")
    def _check(self) -> CheckpointSection:
        exactly_one(self, ("every_steps", "every_epochs"), required=False)
        planned = self.every_steps is not None or self.every_epochs is not None
        if self.keep_every is not None and self.every_minutes is not None and not planned:
            raise ValueError(
                f"keep_every={self.keep_every} does not count saves by time "
                f"(every_minutes={self.every_minutes:g}); give every_steps or every_epochs too"
            )
        return self


class GuardSection(Section):
    """Rollback after steps that are not finite, and after loss spikes.

    After such a step all ranks load the last checkpoint before it.

    Attributes:
        max_rollbacks: rollbacks from one checkpoint after which the run stops.
        skip_steps: batches that a rollback skips; the last is that of the bad step. Each further try skips twice as
            many.
        spike_sigmas: height of a loss spike, which lasts 8 steps or more, above the median of the last 256 losses, in
            robust standard deviations; null detects no spikes.
    """

    max_rollbacks: int = Field(default=3, ge=0)
    # The idea is from PaLM (arXiv 2204.02311 Sec. 5.1), which skipped 200 to 500 batches. The values are ours.
    skip_steps: int = Field(default=16, gt=0)
    spike_sigmas: float | None = Field(default=12.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> GuardSection:
        if not self.max_rollbacks and self.skip_steps != GuardSection.model_fields["skip_steps"].default:
            raise ValueError(f"skip_steps={self.skip_steps} has no effect with max_rollbacks=0")
        return self


class MonitorSection(Section):
    """What is logged, how often, and to which experiment trackers.

    Attributes:
        log_every_steps: steps between lines of `metrics.jsonl`.
        evaluate_every_steps: steps between evaluations on held-out images; in fine-tuning on validation images.
        evaluate_every_epochs: epochs between these evaluations.
        evaluate_images: number of held-out images.
        picture_bands: three bands to show as red, green and blue, or one for gray, by name or by number from 1; null
            chooses (docs/bands.md).
        probe_queries: images that the online probe is scored on; 0 for no probe.
        tensorboard: write TensorBoard files.
        trackers: experiment trackers, which get the metrics and pictures of TensorBoard, and the summary. A run that
            resumes continues the same tracked run. A tracker that fails gives one warning.
    """

    log_every_steps: int = Field(default=20, gt=0)
    evaluate_every_steps: int | None = Field(default=None, gt=0)
    evaluate_every_epochs: float | None = Field(default=None, gt=0)
    evaluate_images: int = Field(default=512, gt=0)
    picture_bands: list[int | str] | None = None
    probe_queries: int = Field(default=500, ge=0)
    tensorboard: bool = True
    trackers: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> MonitorSection:
        exactly_one(self, ("evaluate_every_steps", "evaluate_every_epochs"), required=False)
        if unknown := set(self.trackers) - set(TRACKERS):
            raise ValueError(
                f'trackers={self.trackers}: there is no "{min(unknown)}"; {nearest(min(unknown), TRACKERS)}'
            )
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers={self.trackers} has one twice; give each once")
        return self


class Config(Section):
    """The sections that every training run has."""

    # What a run measures itself on while it trains.
    measured_on: ClassVar[str] = "held-out images"

    run: RunSection
    model: EncoderConfig
    data: DataSection
    optim: OptimSection
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="after")
    def _check(self) -> Config:
        lanes, repeats, batch = self.data.lanes, self.data.repeats, self.train.effective_batch_size
        unit = repeats * (lanes or 1)
        if batch % unit:
            given = [] if lanes is None else [f"data.lanes={lanes}"]
            given += [f"data.repeats={repeats}"] if repeats > 1 else []
            nearest_lanes = (
                f", nearest lanes: {fitting_lanes(lanes, batch // repeats)}"
                if lanes and not batch % repeats
                else ""
            )
            raise ValueError(
                f"{' x '.join(given)} does not divide train.effective_batch_size={batch} (nearest batch: "
                f"{max(1, round(batch / unit)) * unit}{nearest_lanes})"
            )
        if self.optim.name in ("lars", "muon") and self.train.zero_stage:
            raise ValueError(
                f'optim.name="{self.optim.name}" needs whole parameters, which '
                f"train.zero_stage={self.train.zero_stage} shards; use zero_stage=0"
            )
        return self
