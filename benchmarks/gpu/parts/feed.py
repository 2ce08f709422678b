"""Whether data come as fast as the device takes them: decoding alone, then whole runs of `pretrain/run.py`.

Images are made on the spot (`benchmarks.gpu.pictures`). A run's rate and waiting share are the medians of
its log lines after the first two, in which kernels are made and workers start.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.parts.sizes import BASE, SMALL, TINY, Model
from benchmarks.gpu.pictures import Kind, make_images
from benchmarks.harness.workloads import ROOT
from mae_vit.config.load import load_config
from mae_vit.core.files import read_json_lines
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.command import main as pretrain
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.runtime.ranks import Ranks

_LINES, _WARM_LINES = 8, 2
_PHOTOS, _SMALL_IMAGES = Kind(2000, 500, 375, "jpg"), Kind(16384, 32, 32, "png")
_TINY_PHOTOS, _TINY_IMAGES = Kind(40, 50, 38, "jpg"), Kind(40, 16, 16, "png")
# Batches that each worker makes before the clock starts, and while it runs.
_WARM_BATCHES, _BATCHES = 2, 6
_RANDOM_RESIZED = ("data.augment.crop=random_resized", "data.augment.flip=true")
_PADDED = ("data.augment.crop=pad", "data.augment.flip=true")


@dataclass(frozen=True)
class _Size:
    """What is loaded, and by whom.

    Attributes:
        photos: large images, decoded in workers.
        images: small ones, decoded once for all.
        large: trained on the photos.
        small: trained on the small images.
        workers: counts whose decoding is measured.
        steps_per_line: optimizer steps between two lines of a run's log.
    """

    photos: Kind
    images: Kind
    large: Model
    small: Model
    workers: tuple[int, ...]
    steps_per_line: int


_FULL = _Size(_PHOTOS, _SMALL_IMAGES, BASE, SMALL, (1, 8, 15), 10)
_TINY = _Size(_TINY_PHOTOS, _TINY_IMAGES, TINY, TINY, (1,), 1)


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """Decoding in one process; then a process for each run."""
    size = _TINY if tiny else _FULL
    decoding = tuple(f"decode, {workers} workers" for workers in size.workers)
    large, small = f"{size.large.name} from JPEGs", f"{size.small.name} from memory"
    runs = {
        large: (size.large, _PHOTOS_FOLDER, (*_RANDOM_RESIZED, "train.compile=false")),
        f"{large}, compiled": (size.large, _PHOTOS_FOLDER, (*_RANDOM_RESIZED, "train.compile=true")),
        f"{small}, pad": (size.small, _IMAGES_FOLDER, _PADDED),
        f"{small}, random resized": (size.small, _IMAGES_FOLDER, _RANDOM_RESIZED),
    }
    return [
        Job("decode", ("images made", *decoding), _Decode(size, scratch), limit_s=180),
        *(
            Job(key, (key,), _Train(size, scratch, key, model, folder, overrides), limit_s=150)
            for key, (model, folder, overrides) in runs.items()
        ),
    ]


_PHOTOS_FOLDER, _IMAGES_FOLDER = "photos", "images"


def make_shards(size: _Size, name: str, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """Makes images and prepares shards of them, once; returns the shards' folder, and what it took."""
    kind = size.photos if name == _PHOTOS_FOLDER else size.images
    folder, shards = scratch / name, scratch / f"{name}-shards"
    if (shards / "dataset.json").exists():
        return shards, {}
    begun = time.perf_counter()
    made = make_images(folder, kind)
    between = time.perf_counter()
    # More shards than workers.
    samples = max(1, kind.count // 32)
    sources = [find_images(str(folder), out=shards, split="train")]
    prepare(sources, shards, shard_samples=samples, workers=cores_of_rank() if kind.count > 1000 else 0)
    seconds = time.perf_counter() - between
    shutil.rmtree(folder)
    return shards, {
        "images": kind.count,
        "mean_kb": round(made / kind.count / 1e3, 1),
        "made_s": round(between - begun, 1),
        "prepare_s": round(seconds, 1),
    }


@dataclass(frozen=True)
class _Decode:
    size: _Size
    scratch: Path

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        shards, took = make_shards(self.size, _PHOTOS_FOLDER, self.scratch)
        if "images made" in wanted:
            emit("images made", took)
        for workers in self.size.workers:
            if (key := f"decode, {workers} workers") in wanted:
                emit(key, measure_decoding(self.size.large, shards, workers))


def measure_decoding(model: Model, shards: Path, workers: int) -> dict[str, Any]:
    """Images per second that a run's own loader hands over, with nothing else to do."""
    batches = workers * (_WARM_BATCHES + _BATCHES)
    overrides = [*_overrides(model, shards, steps=batches), f"data.workers={workers}", *_RANDOM_RESIZED]
    ranks = Ranks()
    setup = set_up(load_config(PretrainConfig, _config(model), overrides), ranks)
    source = setup.data.batches(ranks, setup.plan, 0, ())
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


@dataclass(frozen=True)
class _Train:
    size: _Size
    scratch: Path
    key: str
    model: Model
    folder: str
    overrides: tuple[str, ...]

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        shards, _ = make_shards(self.size, self.folder, self.scratch)
        emit(self.key, self.train(shards))

    def train(self, shards: Path) -> dict[str, Any]:
        """Runs a job from shards, and reads what it logs."""
        steps, run = _LINES * self.size.steps_per_line, self.scratch / "run"
        overrides = [*_overrides(self.model, shards, steps=steps), *self.overrides]
        every = f"monitor.log_every_steps={self.size.steps_per_line}"
        arguments = ["--config", str(_config(self.model)), "--resume", "never", *overrides, every]
        if code := pretrain([*arguments, f"run.dir={run}"]):
            raise RuntimeError(f"the run ended with exit code {code}")
        rates = summarize_log(read_json_lines(run / "metrics.jsonl"))
        shutil.rmtree(run)
        return {**rates, "batch_size": self.model.batch_size, "steps": steps, "cores": cores_of_rank()}


def summarize_log(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a run's log lines after the first two."""
    counted = lines[_WARM_LINES:]
    medians = {
        name: statistics.median(line[name] for line in counted) for name in ("images_per_s", "data_wait_frac")
    }
    return {
        "images_per_s": round(medians["images_per_s"], 1),
        "data_wait_frac": round(medians["data_wait_frac"], 4),
        "mfu": round(statistics.median(line["mfu"] for line in counted), 4) if "mfu" in counted[0] else None,
        "peak_memory_gib": round(counted[-1]["peak_memory_gib"], 2),
    }


def _config(model: Model) -> Path:
    return ROOT / "configs" / f"{model.config}.yaml"


def _overrides(model: Model, shards: Path, *, steps: int) -> list[str]:
    """A run of some steps on these shards, which saves once and measures nothing else."""
    batch = model.batch_size
    return [
        *model.overrides,
        *("train.epochs=null", f"train.steps={steps}", "train.warmup_epochs=null", "train.warmup_steps=0"),
        *(f"train.effective_batch_size={batch}", f"train.batch_size_per_device={batch}"),
        *("checkpoint.every_epochs=null", "checkpoint.every_minutes=null", f"checkpoint.every_steps={steps}"),
        *("monitor.evaluate_every_epochs=null", f"monitor.evaluate_every_steps={steps}"),
        *(f"data.path={shards}", "monitor.probe_queries=0"),
    ]
