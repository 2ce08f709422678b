"""What `benchmarks/scaling/start.py` measures: the stages of a start, the memory of data workers, look-ups."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from mae_vit.config.load import load_config
from mae_vit.data.index import ShardIndex
from mae_vit.data.order.order import Order, RankSlice, micro_batches
from mae_vit.data.training_data import make_order
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import choose_precision

WORKERS = 2
LOOKUP_BATCH = 4096  # MAE's batch, on one rank
_MIB = 2**20


class Stages:
    """Wall time of what follows each other, from the start of the interpreter on."""

    def __init__(self) -> None:
        """Begins with the process."""
        self._last = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Ends a stage."""
        now = time.time()
        self.seconds[name], self._last = round(now - self._last, 3), now


def start(config: PretrainConfig, batches: int) -> dict[str, Any]:
    """Goes through all that a run does up to its first step, then draws more batches.

    `config` takes the torch engine: to import DeepSpeed takes seconds, on any data.
    """
    stages = Stages()
    stages.end("interpreter_and_imports")
    setup = set_up(config, Ranks())
    stages.end("open_data_and_plan")
    engine = build_engine(config, setup.plan, setup.build(), Ranks(), setup.device)
    stages.end("model_and_engine")
    drawn = setup.data.batches(Ranks(), setup.plan, 0, ())
    batch = next(drawn)
    stages.end("workers_and_first_batch")
    engine.backward(engine.forward(batch).loss)
    engine.step(1e-4)
    stages.end("first_step")
    cpu_s = round(time.process_time(), 2)
    early = workers_memory()
    for _ in range(batches):
        next(drawn)
    late = workers_memory()
    return {
        "stages_s": stages.seconds,
        "total_s": round(sum(stages.seconds.values()), 2),
        "after_imports_s": round(sum(list(stages.seconds.values())[1:]), 2),
        "trainer_cpu_s": cpu_s,
        "worker_uss_mib": {"first_batch": early, f"after_{batches}_more": late},
        "trainer_uss_mib": round(psutil.Process().memory_full_info().uss / _MIB),
    }


def workers_memory() -> int:
    """Unique set size of the largest data worker, in MiB."""
    workers = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    return round(max(worker.memory_full_info().uss for worker in workers) / _MIB)


def look_up(index: ShardIndex, orders: dict[str, Order], steps: int) -> dict[str, dict[str, float]]:
    """Median ms for each `LOOKUP_BATCH` samples: to order them, and to find and read their bytes."""
    times = {}
    for name, order in orders.items():
        ordering, reading = [], []
        # From the middle of the second epoch: no step is easier to find than another.
        first = order.steps_per_epoch * 3 // 2
        positions = micro_batches(order, RankSlice(), start_step=first, stop_step=first + steps)
        for _ in range(steps):
            begun = time.perf_counter()
            _, samples = next(positions)
            ordered = time.perf_counter()
            for sample in samples.tolist():
                index.read(sample)
            ordering.append(ordered - begun)
            reading.append(time.perf_counter() - ordered)
        times[name] = {
            "order_ms": round(1e3 * statistics.median(ordering[1:]), 3),
            "first_order_ms": round(1e3 * ordering[0], 3),
            "find_and_read_ms": round(1e3 * statistics.median(reading[1:]), 1),
        }
    return times


def main() -> None:
    """Measures one start and prints it."""
    parser = argparse.ArgumentParser(description="One start of a run over a data folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--order", choices=("global", "blocks"), default="global")
    parser.add_argument("--batches", type=int, default=40, help="drawn after the first, of 256 images (40)")
    parser.add_argument("--steps", type=int, default=12, help="whose samples are looked up (12)")
    arguments = parser.parse_args()
    overrides = [
        *(f"data.path={arguments.folder}", f"data.order={arguments.order}", f"data.workers={WORKERS}"),
        *("data.augment.crop=random_resized", "model.img_size=64", "model.patch_size=8"),
        *("train.engine=torch", "train.epochs=1", "train.warmup_epochs=0", "monitor.probe_queries=0"),
        f"train.precision={choose_precision('auto', torch.device('cpu')).precision}",
    ]
    config_file = Path(__file__).resolve().parents[2] / "configs" / "mae_cifar_tiny.yaml"
    config = load_config(PretrainConfig, config_file, overrides)
    stages = start(config, arguments.batches)
    data = set_up(config, Ranks()).data
    orders = {
        name: make_order(
            data.index, effective_batch_size=LOOKUP_BATCH, seed=0, lanes=lanes, block_shards=block_shards
        )
        for name, lanes, block_shards in (("global", None, None), ("blocks", 8, 4))
    }
    stages["look_up"] = look_up(data.index, orders, arguments.steps)
    print(json.dumps(stages))
