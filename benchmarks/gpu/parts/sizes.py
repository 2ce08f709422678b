"""The models that the parts train, at full size for a GPU and at a tiny one for a CPU's tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.workloads import Workload, load
from mae_vit.config.presets import find_config
from mae_vit.training.engines.precision import Precision


@dataclass(frozen=True)
class Model:
    """A model at a batch size.

    Attributes:
        name: the field's short one, with its patch size.
        preset: in `configs/`.
        batch_size: images of a step.
        steps: of a turn; about a second of them.
        overrides: of the config.
    """

    name: str
    preset: str
    batch_size: int
    steps: int
    overrides: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        """The preset's file."""
        return find_config(self.preset)

    def workload(self, *overrides: str, precision: Precision = "bf16") -> Workload:
        """The step of this model."""
        words, size = [*self.overrides, *overrides], self.batch_size
        return load(self.config, words, batch_size=size, precision=precision, threads=1)


SMALL = Model("Ti/4", "mae_cifar_vit_t2", 4096, 20, ("model.patch_size=4",))
BASE = Model("B/16", "mae_base", 256, 15)
LARGE = Model("L/16", "mae_large", 128, 12)
# Recomputation would be measured otherwise.
HUGE = Model("H/14", "mae_huge", 64, 8, ("train.activation_checkpointing=false",))
_NARROW = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "model.img_size=16")
_SHALLOW = ("objective.decoder_embed_dim=16", "objective.decoder_depth=1", "objective.decoder_num_heads=2")
TINY = Model("tiny/4", "mae_cifar_tiny", 8, 2, (*_NARROW, *_SHALLOW))
