"""Whether data come as fast as the device takes them: decoding alone, then whole runs of `pretrain/run.py`.

Images are made on the spot: noise with the spectrum of photographs, whose amplitude falls as the frequency rises
(1/f; Field, J. Opt. Soc. Am. A 4, 1987), so that JPEG has as much to code in it: 500 x 375 at quality 90 takes some
110 KB. A run's rate and waiting share are the medians of its log lines after the first two, in which kernels are made
and workers start.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.gpu.figures import Wave
from benchmarks.gpu.parts.sizes import BASE, TINY, Model
from benchmarks.harness.workloads import lengths
from mae_vit.config.load import load_config
from mae_vit.core.batch import Batch
from mae_vit.core.files import read_json_lines
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.command import main as pretrain
from mae_vit.pretraining.setup import Setup, set_up
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.runtime.ranks import Ranks

_LINES, _WARM_LINES = 8, 2
# Batches that each worker makes before the clock starts, and while it runs.
_WARM_BATCHES, _BATCHES = 2, 6
_CLASSES = 10
# Number, width and height.
Images = tuple[int, int, int]


def waves(*, tiny: bool, scratch: Path) -> list[Wave]:
    """Decoding; then runs."""
    model, photos = (TINY, (40, 50, 38)) if tiny else (BASE, (2000, 500, 375))
    decode = partial(measure_decoding, model, photos, scratch)
    # Optimizer steps between two lines of a run's log.
    train = partial(measure_run, model, photos, scratch, 1 if tiny else 10)
    decoding = {f"decode, {n} workers": partial(decode, n) for n in ((1,) if tiny else (1, 8, 15))}
    return [
        [{"images made": partial(make_shards, *photos, scratch), **decoding}],
        [{f"{model.name} from JPEGs": partial(train, "train.compile=false")}],
        [{f"{model.name} from JPEGs, compiled": partial(train, "train.compile=true")}],
    ]


def make_shards(count: int, width: int, height: int, scratch: Path) -> dict[str, Any]:
    """Makes images and prepares shards of them, once; returns what it took."""
    folder, shards = scratch / "images", scratch / "shards"
    if (shards / "dataset.json").exists():
        return {}
    begun = time.perf_counter()
    made = make_images(folder, count, width, height)
    between = time.perf_counter()
    # More shards than workers.
    samples, workers = max(1, count // 32), cores_of_rank() if count > 1000 else 0
    sources = [find_images(str(folder), out=shards, split="train")]
    prepare(sources, shards, shard_samples=samples, workers=workers)
    took = {"made_s": round(between - begun, 1), "prepare_s": round(time.perf_counter() - between, 1)}
    shutil.rmtree(folder)
    return {"images": count, "mean_kb": round(made / count / 1e3, 1), **took}


def make_images(folder: Path, count: int, width: int, height: int) -> int:
    """Writes JPEGs of a size in pixels into class folders below `folder`, by all cores; returns their bytes."""
    for label in range(_CLASSES):
        (folder / "train" / str(label)).mkdir(parents=True, exist_ok=True)
    with ThreadPool(cores_of_rank()) as pool:  # numpy and JPEG leave the interpreter's lock
        return sum(pool.map(partial(_write, folder, height, width), range(count)))


def _write(folder: Path, height: int, width: int, number: int) -> int:
    path = folder / "train" / str(number % _CLASSES) / f"{number:06d}.jpg"
    Image.fromarray(draw(number, height, width)).save(path, quality=90)
    return path.stat().st_size


def draw(number: int, height: int, width: int) -> np.ndarray:
    """Draws an image: uint8 (H, W, 3), a gradient of color below noise of falling amplitude."""
    random = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf  # no mean of its own
    noise = random.standard_normal((3, height, width), np.float32)
    layers = np.fft.irfft2(np.fft.rfft2(noise) / frequency, s=(height, width))
    # Colors of photographs go together: most of the detail is in brightness.
    layers = layers[:1] + 0.3 * layers
    layers *= 45 / layers.std()
    down, across = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)
    slopes = random.uniform(-40, 40, (3, 2, 1, 1))
    pixels = 120 + layers + slopes[:, 0] * down + slopes[:, 1] * across
    return pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def open_run(
    model: Model, images: Images, scratch: Path, steps: int, *words: str
) -> tuple[Setup, Iterator[Batch]]:
    """A run of so many steps on shards of the images, and its batches."""
    make_shards(*images, scratch)
    overrides = [*_overrides(model, scratch, steps=steps), *words]
    setup = set_up(load_config(PretrainConfig, model.config, overrides), Ranks())
    return setup, setup.data.batches(Ranks(), setup.plan, 0, ())


def measure_decoding(model: Model, photos: Images, scratch: Path, workers: int) -> dict[str, Any]:
    """Images per second that a run's own loader hands over, with nothing else to do."""
    batches = workers * (_WARM_BATCHES + _BATCHES)
    setup, source = open_run(model, photos, scratch, batches, f"data.workers={workers}")
    for _ in range(workers * _WARM_BATCHES):
        next(source)
    begun, processor = time.perf_counter(), time.process_time()
    for _ in range(workers * _BATCHES):
        next(source)
    seconds = time.perf_counter() - begun
    rate = workers * _BATCHES * setup.plan.batch_size_per_device / seconds
    return {
        "images_per_s": round(rate, 1),
        "per_worker": round(rate / workers, 1),
        "trainer_busy": round((time.process_time() - processor) / seconds, 3),
        "cores": cores_of_rank(),
    }


def measure_run(model: Model, images: Images, scratch: Path, every: int, compiled: str) -> dict[str, Any]:
    """Runs a job from shards, and reads what it logs every so many steps."""
    make_shards(*images, scratch)
    steps, run = _LINES * every, scratch / "run"
    length = _overrides(model, scratch, steps=steps)
    words = ["--config", str(model.config), "--resume", "never", *length, compiled]
    if code := pretrain([*words, f"monitor.log_every_steps={every}", f"run.dir={run}"]):
        raise RuntimeError(f"the run ended with exit code {code}")
    lines = read_json_lines(run / "metrics.jsonl")[_WARM_LINES:]
    shutil.rmtree(run)

    def median(name: str, digits: int) -> float:
        return round(float(np.median([line[name] for line in lines])), digits)

    return {
        "images_per_s": median("images_per_s", 1),
        "data_wait_frac": median("data_wait_frac", 4),
        "mfu": median("mfu", 4) if "mfu" in lines[0] else None,
        "peak_memory_gib": round(lines[-1]["peak_memory_gib"], 2),
        **{"batch_size": model.batch_size, "steps": steps, "cores": cores_of_rank()},
    }


def _overrides(model: Model, scratch: Path, *, steps: int) -> list[str]:
    """A run of some steps on the shards, which saves once and measures nothing else."""
    length = lengths(turns=1, steps=steps - 1, batch_size=model.batch_size)
    batch = f"train.batch_size_per_device={model.batch_size}"
    views = ["data.augment.crop=random_resized", "data.augment.flip=true"]
    return [*model.overrides, *length, *views, batch, f"data.path={scratch / 'shards'}"]
