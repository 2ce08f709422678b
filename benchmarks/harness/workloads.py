"""What benchmarks train: steps of a config on ready-made images."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import ROOT
from benchmarks.harness.turns import serve
from mae_vit.config.load import load_config
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import build_objective
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.build import optimizer_options
from mae_vit.training.engines.cost import Estimate, MetaStep
from mae_vit.training.engines.precision import Precision
from mae_vit.training.engines.torch_engine import TorchEngine

TINY = ROOT / "configs" / "pretrain" / "mae_cifar_tiny.yaml"
BASE = ROOT / "configs" / "pretrain" / "mae_base.yaml"
# Of the labels, where an objective learns from them.
_CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A step of a config's run with `threads` of each process on a CPU; processes hand it to each other."""

    config: PretrainConfig
    batch_size: int
    precision: Precision
    threads: int
    compiled: bool = False

    @property
    def info(self) -> EncoderInfo:
        """The encoder; any normalization costs the same."""
        channels, objective = self.config.model.channels, self.config.objective.name
        return EncoderInfo(self.config.model.geometry(), (0.5,) * channels, (0.25,) * channels, objective)

    @property
    def num_classes(self) -> int:
        """Classes of the labels; 0 where they are of no use."""
        return _CLASSES if self.config.objective.uses_labels else 0

    @property
    def costs(self) -> Estimate:
        """What a step costs."""
        shape, recomputed = (
            (self.info.in_chans, *self.info.img_size),
            self.config.train.activation_checkpointing,
        )
        return MetaStep(self.objective, shape, self.batch_size, recomputed).estimate()

    def device(self) -> torch.device:
        """The device, as a run finds it, with this many threads."""
        device = find_device(Ranks())
        torch.set_num_threads(self.threads)
        return device

    def objective(self) -> Objective:
        """Builds encoder and objective."""
        return build_objective(self.config, self.info, num_classes=self.num_classes)

    def engine(self, device: torch.device) -> TorchEngine:
        """Builds the torch engine on a device."""
        options = StepOptions(
            optimizer=optimizer_options(self.config),
            clip_grad=self.config.optim.clip_grad,
            precision=self.precision,
            batch_size_per_device=self.batch_size,
            accumulation=1,
            compile=self.compiled,
            attention=self.config.train.attention,
        )
        return TorchEngine(self.objective(), options, Ranks(), device)

    def batches(self, device: torch.device) -> Callable[[int], Batch]:
        """Returns the batch of a step: always the same uint8 noise (B, C, H, W), keys of its own."""
        shape = (self.batch_size, self.config.model.channels, *self.config.model.image_hw)
        images = torch.randint(0, 256, shape, dtype=torch.uint8).to(device)
        first = torch.arange(self.batch_size, device=device)
        labels = first % _CLASSES

        def batch_of(step: int) -> Batch:
            return Batch(images, labels, SampleKeys(0, 0, first + step * self.batch_size))

        return batch_of

    def steps(self) -> Callable[[int], None]:
        """Builds the torch engine and returns its step."""
        torch.manual_seed(0)
        device = self.device()
        engine = self.engine(device)
        batch_of = self.batches(device)

        def step(number: int) -> None:
            engine.backward(engine.forward(batch_of(number)).loss)
            engine.step(1e-4)

        return step

    def live(self, pipe: Connection) -> None:
        """Lives as a contender that takes these steps."""
        serve(self.steps(), pipe, self.device())

    def mae(self) -> MAEConfig:
        """The objective; raises InputError if it is not MAE."""
        if not isinstance(self.config.objective, MAEConfig):
            raise InputError(
                f'--config is one of objective "{self.config.objective.name}": give one of "mae"'
            )
        return self.config.objective

    def with_sections(self, **sections: Any) -> Workload:
        """The same step with other sections of the config."""
        return replace(self, config=self.config.model_copy(update=sections))


def load(
    config: Path, overrides: Sequence[str], *, batch_size: int, precision: Precision, threads: int
) -> Workload:
    """Reads the config of a pretraining run; raises InputError for a config that is wrong."""
    changed = [*overrides, f"train.precision={precision}"]
    return Workload(load_config(PretrainConfig, config, changed), batch_size, precision, threads)


def load_for(arguments: argparse.Namespace, *overrides: str) -> Workload:
    """The step that a command line asks for, whose own overrides come last."""
    words = [*overrides, *arguments.overrides]
    sizes = {"batch_size": arguments.batch, "threads": arguments.threads}
    return load(arguments.config, words, precision=arguments.precision, **sizes)


def lengths(*, turns: int, steps: int, batch_size: int) -> list[str]:
    """Overrides that set a run's length to its turns and a last step; in between the log alone is written."""
    total = turns * steps + 1
    return [
        *(f"{key}=null" for key in ("train.epochs", "train.samples", "train.warmup_epochs")),
        *(f"checkpoint.every_{unit}=null" for unit in ("epochs", "minutes")),
        *(f"train.steps={total}", "train.warmup_steps=0", f"train.effective_batch_size={batch_size}"),
        "monitor.evaluate_every_epochs=null",
        *(f"checkpoint.every_steps={total}", f"monitor.evaluate_every_steps={total}"),
        "monitor.probe_queries=0",
    ]
