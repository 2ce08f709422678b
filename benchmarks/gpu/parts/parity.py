"""The same numbers on a CPU and on the device: masks, losses of ten steps, checkpoints that change the device.

Losses are of the torch engine in a small encoder under each objective. The CPU in float32 is what all
others are compared with; compiled steps are compared with plain ones on the same device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.parts.sizes import COMPARED, TINY, with_objective
from benchmarks.harness.workloads import Workload
from mae_vit.config.schema import CheckpointSection
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.masking import corrupt, patch_noise, random_masking
from mae_vit.objectives import OBJECTIVES
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import load_checkpoint
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.precision import Precision
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.engines.torch_engine import TorchEngine

STEPS = 10
# Largest relative difference of any of the losses, by precision.
AT_MOST: dict[Precision, float] = {"fp32": 1e-5, "bf16": 2e-2}
_LR = 1e-4
# (images, patches): of small images, of ViT-B and of ViT-H.
_MASKED = ((4096, 64), (256, 196), (128, 256))
_CPU = torch.device("cpu")


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """A process for what is quick, and one for each compiled objective."""
    plain = [f"{name} {precision}" for name in OBJECTIVES for precision in AT_MOST]
    moved = ["checkpoint from the CPU", "checkpoint to the CPU"]
    measure = _Measure(tiny)
    return [
        Job("masks, losses, checkpoints", ("masks", *plain, *moved), measure, limit_s=240),
        *(Job(f"{name} compiled", (f"{name} compiled",), measure) for name in OBJECTIVES),
    ]


class _Measure:
    """Measures whatever is wanted of the part."""

    def __init__(self, tiny: bool) -> None:
        self._tiny = tiny

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        device = find_device(Ranks())
        # Of tiny steps more than one thread only waits.
        torch.set_num_threads(1 if self._tiny else cores_of_rank())
        if "masks" in wanted:
            emit("masks", compare_masks(device, _MASKED[1:2] if self._tiny else _MASKED))
        for name in OBJECTIVES:
            self._objective(name, device, wanted, emit)
        if "checkpoint from the CPU" in wanted:
            emit("checkpoint from the CPU", move_checkpoint(self._workload("mae", "fp32"), _CPU, device))
        if "checkpoint to the CPU" in wanted:
            emit("checkpoint to the CPU", move_checkpoint(self._workload("mae", "fp32"), device, _CPU))

    def _objective(self, name: str, device: torch.device, wanted: frozenset[str], emit: Emit) -> None:
        if wanted.isdisjoint({f"{name} {kind}" for kind in (*AT_MOST, "compiled")}):
            return
        workload = self._workload(name, "fp32")
        if f"{name} compiled" in wanted:
            expected = take_losses(workload, device)
            losses = take_losses(workload.compile(), device)
            emit(f"{name} compiled", compare_losses(expected, losses, AT_MOST["fp32"]))
            return
        expected = take_losses(workload, _CPU)
        for precision, at_most in AT_MOST.items():
            if f"{name} {precision}" in wanted:
                losses = take_losses(self._workload(name, precision), device)
                emit(f"{name} {precision}", compare_losses(expected, losses, at_most))

    def _workload(self, name: str, precision: Precision) -> Workload:
        model = TINY if self._tiny else COMPARED
        return with_objective(model.workload(precision=precision), name)


def compare_masks(device: torch.device, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Draws masks and corruptions on the CPU and on a device; they are to be equal bit for bit."""
    different = []
    for images, patches in sizes:
        drawn = []
        for place in (_CPU, device):
            keys = SampleKeys(2**40 + 7, 3, torch.arange(images, device=place) + 2**31)
            masking = random_masking(patch_noise(keys, patches), 0.75)
            changed = corrupt(keys, patches, corrupt_ratio=0.5, mask_share=0.8, random_share=0.1)
            tensors = {**vars(masking), **vars(changed)}
            drawn.append({name: tensor.cpu() for name, tensor in tensors.items()})
        first, second = drawn
        different += [
            f"{name} of {images} x {patches}" for name in first if not torch.equal(first[name], second[name])
        ]
    return {"compared": [list(size) for size in sizes], "different": different, "met": not different}


def take_losses(workload: Workload, device: torch.device) -> list[float]:
    """The losses of some steps from a fixed beginning."""
    return _continue(_engine(workload, device), workload, 0, STEPS)


def compare_losses(expected: Sequence[float], losses: Sequence[float], at_most: float) -> dict[str, Any]:
    """The largest relative difference, against its bound; a loss that is no number meets none."""
    differences = [abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True)]
    met = all(difference <= at_most for difference in differences)
    largest = max(differences, key=lambda difference: (difference != difference, difference))
    return {
        "largest_difference": float(f"{largest:.2e}"),
        "at_most": at_most,
        "met": met,
        "losses": list(losses),
        "expected": list(expected),
    }


def move_checkpoint(workload: Workload, first: torch.device, second: torch.device) -> dict[str, Any]:
    """Trains half of the steps on one device, and the rest from a checkpoint of it on another."""
    expected = take_losses(workload, _CPU)
    engine, half = _engine(workload, first), STEPS // 2
    losses = _continue(engine, workload, 0, half)
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder:
        options = CheckpointSection(every_steps=half)
        saver = Saver(engine, Path(folder), options, identity={}, every_steps=half, say=print)
        if not saver.save(half, None, LossHistory(), wait=True):
            raise OSError("the checkpoint could not be written: its message says why")
        resumed = _engine(workload, second)
        resumed.restore(load_checkpoint(Path(folder) / f"step-{half:08d}").state)
    losses += _continue(resumed, workload, half, STEPS)
    return compare_losses(expected, losses, AT_MOST["fp32"])


def _engine(workload: Workload, device: torch.device) -> Engine:
    return TorchEngine(workload.objective(), workload.options(), Ranks(), device)


def _continue(engine: Engine, workload: Workload, start: int, stop: int) -> list[float]:
    torch.manual_seed(0)
    batch_of, losses = workload.batches(engine.device), []
    for step in range(start, stop):
        loss = engine.forward(batch_of(step)).loss
        engine.backward(loss)
        engine.step(_LR)
        losses.append(float(loss.detach()))
    return losses
