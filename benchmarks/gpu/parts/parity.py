"""The same numbers on a CPU and on the device: masks, losses of ten steps, checkpoints that change the device.

Losses are of the torch engine in a small encoder under each objective. The CPU in float32 is what all others are
compared with; compiled steps are compared with plain ones on the same device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.gpu.figures import Group
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
from mae_vit.training.engines.precision import Precision
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.engines.torch_engine import TorchEngine

STEPS = 10
# Largest relative difference of any of the losses, by precision.
AT_MOST: dict[Precision, float] = {"fp32": 1e-5, "bf16": 2e-2}
# (images, patches): of small images, of ViT-B and of ViT-H.
_MASKED = ((4096, 64), (256, 196), (128, 256))
_CPU = torch.device("cpu")


def groups(*, tiny: bool, scratch: Path) -> list[Group]:
    """A process for what is quick, and one for each compiled objective."""
    plain = {
        f"{name} {precision}": partial(to_cpu, name, precision, tiny)
        for name in OBJECTIVES
        for precision in AT_MOST
    }
    moved = {f"checkpoint {way} the CPU": partial(move_checkpoint, way, tiny) for way in ("from", "to")}
    quick = {"masks": partial(compare_masks, _MASKED[1:2] if tiny else _MASKED), **plain, **moved}
    return [quick, *({f"{name} compiled": partial(to_eager, name, tiny)} for name in OBJECTIVES)]


def compare_masks(sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Draws masks and corruptions on the CPU and on the device; they are to be equal bit for bit."""
    different = []
    for images, patches in sizes:
        drawn = []
        for place in (_CPU, find_device(Ranks())):
            keys = SampleKeys(2**40 + 7, 3, torch.arange(images, device=place) + 2**31)
            masking = random_masking(patch_noise(keys, patches), 0.75)
            changed = corrupt(keys, patches, corrupt_ratio=0.5, mask_share=0.8, random_share=0.1)
            tensors = {**vars(masking), **vars(changed)}
            drawn.append({name: tensor.cpu() for name, tensor in tensors.items()})
        first, second = drawn
        equal = {name: torch.equal(first[name], second[name]) for name in first}
        different += [f"{name} of {images} x {patches}" for name in equal if not equal[name]]
    return {"compared": [list(size) for size in sizes], "different": different, "met": not different}


def to_cpu(name: str, precision: Precision, tiny: bool) -> dict[str, Any]:
    """Losses on the device, against those of the CPU in float32."""
    device = find_device(Ranks())
    losses = take_losses(_workload(name, precision, tiny), device)
    return compare_losses(_expected(name, tiny), losses, AT_MOST[precision])


def to_eager(name: str, tiny: bool) -> dict[str, Any]:
    """Losses of compiled steps, against those of plain ones."""
    device, workload = find_device(Ranks()), _workload(name, "fp32", tiny)
    losses = take_losses(replace(workload, compiled=True), device)
    return compare_losses(take_losses(workload, device), losses, AT_MOST["fp32"])


def move_checkpoint(way: Literal["from", "to"], tiny: bool) -> dict[str, Any]:
    """Trains half of the steps on one device, and the rest from a checkpoint of it on the other."""
    workload, half, device = _workload("mae", "fp32", tiny), STEPS // 2, find_device(Ranks())
    first, second = (_CPU, device) if way == "from" else (device, _CPU)
    engine = workload.engine(first)
    losses = _train(engine, workload, range(half))
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder:
        options = CheckpointSection(every_steps=half)
        saver = Saver(engine, Path(folder), options, identity={}, every_steps=half, say=print)
        if not saver.save(half, None, LossHistory(), wait=True):
            raise OSError("the checkpoint could not be written: its message says why")
        resumed = workload.engine(second)
        resumed.restore(load_checkpoint(Path(folder) / f"step-{half:08d}").state)
    losses += _train(resumed, workload, range(half, STEPS))
    return compare_losses(_expected("mae", tiny), losses, AT_MOST["fp32"])


@cache
def _expected(name: str, tiny: bool) -> list[float]:
    return take_losses(_workload(name, "fp32", tiny), _CPU)


def take_losses(workload: Workload, device: torch.device) -> list[float]:
    """The losses of some steps from a fixed beginning."""
    return _train(workload.engine(device), workload, range(STEPS))


def compare_losses(expected: Sequence[float], losses: Sequence[float], at_most: float) -> dict[str, Any]:
    """The largest relative difference, against its bound; a loss that is no number meets none."""
    largest = float(np.max(np.abs(np.subtract(expected, losses) / expected)))
    return {
        "largest_difference": float(f"{largest:.2e}"),
        "at_most": at_most,
        "met": largest <= at_most,
        "losses": list(losses),
        "expected": list(expected),
    }


def _workload(name: str, precision: Precision, tiny: bool) -> Workload:
    # Of tiny steps more than one thread only waits.
    torch.set_num_threads(1 if tiny else cores_of_rank())
    model = TINY if tiny else COMPARED
    return with_objective(model.workload(precision=precision), name)


def _train(engine: TorchEngine, workload: Workload, steps: range) -> list[float]:
    torch.manual_seed(0)
    batch_of, losses = workload.batches(engine.device), []
    for step in steps:
        loss = engine.forward(batch_of(step)).loss
        engine.backward(loss)
        engine.step(1e-4)
        losses.append(float(loss.detach()))
    return losses
