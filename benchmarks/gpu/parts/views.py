"""Small images in memory: their views made by data workers and by the device, alone and in whole runs.

Both places must give the same bits, or the part fails.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.figures import Wave
from benchmarks.gpu.parts.feed import Images, make_shards, measure_run, open_run
from benchmarks.gpu.parts.sizes import SMALL, TINY, Model
from benchmarks.harness.turns import synchronize
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.training.engines import compiling
from mae_vit.training.trainer import Copier

_BOX = ("data.augment.crop=random_resized", "data.augment.flip=true")
WAYS = {
    "pad": ("data.augment.crop=pad", "data.augment.flip=true"),
    "random_resized": _BOX,
    "random_resized and color": (*_BOX, "data.augment.policy=color"),
}
PLACES = ("device", "host")
CONTRAST = Model("two views", "contrastive_mae_scratch_cifar_tiny", 512, 40)
_WARM, _BATCHES, _COMPARED = 6, 40, 3


def waves(*, tiny: bool, scratch: Path) -> list[Wave]:
    """Batches alone, in one process for each place; then whole runs."""
    models = (TINY,) if tiny else (SMALL, CONTRAST)
    images = (40, 16, 16) if tiny else (20_480, 32, 32)
    equal = {f"{way}: equal": partial(compare, models[0], images, scratch, way) for way in WAYS}
    return [
        [{"images made": partial(make_shards, *images, scratch), **equal}],
        *(
            [
                {
                    f"{way}, {place}, {model.batch_size}": partial(
                        measure, model, images, scratch, way, place
                    )
                    for model in models
                    for way in WAYS
                }
            ]
            for place in PLACES
        ),
        *(
            [{f"{model.name}, {place}": partial(train, model, images, scratch, place, 1 if tiny else 10)}]
            for model in models
            for place in PLACES
        ),
    ]


def compare(model: Model, images: Images, scratch: Path, way: str) -> dict[str, Any]:
    """Whether some batches of both places have the same bits."""
    runs = [
        open_run(model, images, scratch, _COMPARED, *WAYS[way], f"data.augment.device={place}")
        for place in PLACES
    ]
    both = [islice(batches, _COMPARED) for _, batches in runs]
    differences = [
        (ours.images.cpu().int() - theirs.images.int()).abs() for ours, theirs in zip(*both, strict=True)
    ]
    return {
        "largest_difference": max(int(difference.max()) for difference in differences),
        "met": not any(difference.any() for difference in differences),
    }


def measure(model: Model, images: Images, scratch: Path, way: str, place: str) -> dict[str, Any]:
    """Images per second of batches alone, copied to the device."""
    words = [*WAYS[way], f"data.augment.device={place}"]
    setup, batches = open_run(model, images, scratch, _WARM + _BATCHES, *words)
    device, copy = setup.device, Copier(setup.device)
    for _ in range(_WARM):
        copy(next(batches))
    synchronize(device)
    begun, processor = time.perf_counter(), time.thread_time()
    for _ in range(_BATCHES):
        copy(next(batches))
    host = time.thread_time() - processor
    synchronize(device)
    seconds = time.perf_counter() - begun
    return {
        "images_per_s": round(_BATCHES * model.batch_size / seconds, 1),
        # Of the thread that launches kernels.
        "trainer_ms_per_batch": round(1e3 * host / _BATCHES, 2),
        "workers": setup.data.workers,
        "cores": cores_of_rank(),
    }


def train(model: Model, images: Images, scratch: Path, place: str, every: int) -> dict[str, Any]:
    """A whole run's rate and waiting, compiled as a long run would be: as CUDA graphs where a step is short."""
    there = replace(model, overrides=(*model.overrides, f"data.augment.device={place}"))
    with patch.object(compiling, "_COMPILE_S", 0.0):
        return measure_run(there, images, scratch, every, "train.compile=auto")
