"""What benchmarks train: the model and objective of a config, on ready-made images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mae_vit.config.geometry import resolve_encoder
from mae_vit.config.load import load_config
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives import ObjectiveSection
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import build_objective, estimate_costs
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import Engine, StepOptions
from mae_vit.training.engines.build import optimizer_options
from mae_vit.training.engines.precision import Precision
from mae_vit.training.engines.torch_engine import TorchEngine

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "mae_cifar_tiny.yaml"
BASE = ROOT / "configs" / "mae_base.yaml"
# Of the labels, where an objective learns from them.
_CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A step to be measured; processes hand it to each other.

    Attributes:
        config: of the run whose step it is.
        batch_size: images per step.
        precision: of the forward and backward pass.
        threads: of each process on a CPU.
        compiled: by torch.compile.
        cuda_graphs: what is compiled is recorded, and launched as one.
    """

    config: PretrainConfig
    batch_size: int
    precision: Precision
    threads: int
    compiled: bool = False
    cuda_graphs: bool = False

    @property
    def info(self) -> EncoderInfo:
        """The encoder; any normalization costs the same."""
        channels, objective = self.config.model.channels, self.config.objective.name
        return resolve_encoder(
            self.config.model, mean=(0.5,) * channels, std=(0.25,) * channels, objective=objective
        )

    @property
    def num_classes(self) -> int:
        """Classes of the labels; 0 where they are of no use."""
        return _CLASSES if self.config.objective.uses_labels else 0

    @property
    def flops_per_image(self) -> float:
        """Model FLOPs of a training step: 3 x forward, no recomputation."""
        sizes = {"num_classes": self.num_classes, "batch_size_per_device": self.batch_size}
        return estimate_costs(self.config, self.info, **sizes).flops_per_image

    def device(self) -> torch.device:
        """The device, as a run finds it, with this many threads."""
        device = find_device(Ranks())
        torch.set_num_threads(self.threads)
        return device

    def objective(self) -> Objective:
        """Builds encoder and objective."""
        return build_objective(self.config, self.info, num_classes=self.num_classes)

    def options(self) -> StepOptions:
        """How an engine is to take the step."""
        return StepOptions(
            optimizer=optimizer_options(self.config),
            clip_grad=self.config.optim.clip_grad,
            precision=self.precision,
            batch_size_per_device=self.batch_size,
            accumulation=1,
            compile=self.compiled,
            cuda_graphs=self.cuda_graphs,
        )

    def images(self, device: torch.device) -> torch.Tensor:
        """uint8 noise (B, C, H, W)."""
        height, width = self.config.model.image_hw
        shape = (self.batch_size, self.config.model.channels, height, width)
        return torch.randint(0, 256, shape, dtype=torch.uint8).to(device)

    def batches(self, device: torch.device, *, pinned: bool = False) -> Callable[[int], Batch]:
        """Returns the batch of a step: always the same images, keys of its own."""
        images = self.images(device)
        first = torch.arange(self.batch_size, device=device)
        labels = first % _CLASSES
        if pinned:
            images, labels = images.pin_memory(), labels.pin_memory()

        def batch_of(step: int) -> Batch:
            index = first + step * self.batch_size
            return Batch(images, labels, SampleKeys(0, 0, index.pin_memory() if pinned else index))

        return batch_of

    def steps(self) -> Callable[[int], None]:
        """Builds the torch engine and returns its step."""
        torch.manual_seed(0)
        device = self.device()
        engine: Engine = TorchEngine(self.objective(), self.options(), Ranks(), device)
        batch_of = self.batches(device)

        def step(number: int) -> None:
            engine.backward(engine.forward(batch_of(number)).loss)
            engine.step(1e-4)

        return step

    def with_objective(self, section: ObjectiveSection) -> Workload:
        """The same encoder under another objective."""
        return replace(self, config=self.config.model_copy(update={"objective": section}))

    def compile(self, *, cuda_graphs: bool = False) -> Workload:
        """The same under torch.compile."""
        return replace(self, compiled=True, cuda_graphs=cuda_graphs)

    def plain(self) -> Workload:
        """The same without torch.compile."""
        return replace(self, compiled=False, cuda_graphs=False)


def load(
    config: Path, overrides: Sequence[str], *, batch_size: int, precision: Precision, threads: int
) -> Workload:
    """Reads the config of a pretraining run.

    Raises:
        InputError: for a config that is wrong.
    """
    changed = [*overrides, f"train.precision={precision}"]
    return Workload(load_config(PretrainConfig, config, changed), batch_size, precision, threads)
