"""The models that the parts train, at full size for a GPU and at a tiny one for a CPU's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.workloads import ROOT, Workload, load
from mae_vit.objectives import OBJECTIVES
from mae_vit.training.engines.precision import Precision

PRECISION: Precision = "bf16"


@dataclass(frozen=True)
class Model:
    """A model at a batch size.

    Attributes:
        name: the field's short one, with its patch size.
        config: in `configs/`.
        batch_size: images of a step, halved where they do not fit.
        steps: of a turn; about a second of them.
        overrides: of the config.
    """

    name: str
    config: str
    batch_size: int
    steps: int
    overrides: tuple[str, ...] = ()

    def workload(
        self, *overrides: str, batch_size: int | None = None, precision: Precision = PRECISION
    ) -> Workload:
        """The step of this model."""
        return load(
            ROOT / "configs" / f"{self.config}.yaml",
            [*self.overrides, *overrides],
            batch_size=batch_size or self.batch_size,
            precision=precision,
            threads=1,
        )


SMALL = Model("Ti/4", "mae_cifar_vit_t2", 4096, 20, ("model.patch_size=4",))
# A step of a few milliseconds: what it costs to launch, and what CUDA graphs save of it.
LAUNCHED = Model("Ti/4 x 256", "mae_cifar_vit_t2", 256, 60, ("model.patch_size=4",))
BASE = Model("B/16", "mae_base", 256, 15)
LARGE = Model("L/16", "mae_large", 256, 6)
# Recomputation would be measured otherwise: 128 images fit 80 GB without it.
HUGE = Model("H/14", "mae_huge", 128, 6, ("train.activation_checkpointing=false",))
FULL = (SMALL, BASE, LARGE, HUGE)
_NARROW = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "model.img_size=16")
_SHALLOW = ("objective.decoder_embed_dim=16", "objective.decoder_depth=1", "objective.decoder_num_heads=2")
TINY = Model("tiny/4", "mae_cifar_tiny", 8, 2, (*_NARROW, *_SHALLOW))
# What numbers are compared on: small enough for ten steps on a CPU, with every kind of layer.
COMPARED = Model("compared", "mae_cifar_tiny", 64, 1, ("model.depth=3",))
# Objectives as small as the encoder; one that is not named here has its defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    "mae": {"decoder_embed_dim": 48, "decoder_depth": 2, "decoder_num_heads": 4},
    "contrastive_mae": {"group_size": 4},
    "joint": {"mae": {"decoder_embed_dim": 48, "decoder_depth": 2, "decoder_num_heads": 4}},
}


def models(*, tiny: bool) -> Sequence[Model]:
    """Those whose rates are measured."""
    return (TINY,) if tiny else FULL


def with_objective(workload: Workload, name: str) -> Workload:
    """The same encoder under one of the registered objectives."""
    section = OBJECTIVES[name].model_validate({"name": name, **_OPTIONS.get(name, {})})
    return workload.with_objective(section)
