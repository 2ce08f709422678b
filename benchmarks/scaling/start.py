"""One start of a run over a data folder, in a process of its own: stages to the first step, memory, look-ups.

It imports what a run imports, as that takes time too. `benchmarks/scale.py` runs it over folders of many sizes.

    python benchmarks/scaling/start.py FOLDER
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mae_vit.config.load import load_config
from mae_vit.data.index import ShardIndex
from mae_vit.data.order.order import RankSlice, micro_batches
from mae_vit.data.training_data import make_order
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import choose_precision

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2
LOOKUP_BATCH = 4096  # MAE's batch, on one rank
# Batches of 256 images after the first, and steps whose samples are looked up.
_BATCHES, _STEPS = 40, 12
_MIB = 2**20
# Lanes and shards of a block, by order.
_ORDERS: dict[str, tuple[int | None, int | None]] = {"global": (None, None), "blocks": (8, 4)}


def start(config: PretrainConfig) -> dict[str, Any]:
    """Goes through all that a run does up to its first step, then draws more batches.

    `config` takes the torch engine: to import DeepSpeed takes seconds, on any data.
    """
    stages: dict[str, float] = {}
    last = psutil.Process().create_time()

    def end(stage: str) -> None:
        nonlocal last
        now = time.time()
        stages[stage], last = round(now - last, 3), now

    end("interpreter_and_imports")
    setup = set_up(config, Ranks())
    end("open_data_and_plan")
    engine = build_engine(config, setup.plan, setup.build(), Ranks(), setup.device)
    end("model_and_engine")
    drawn = setup.data.batches(Ranks(), setup.plan, 0, ())
    batch = next(drawn)
    end("workers_and_first_batch")
    engine.backward(engine.forward(batch).loss)
    engine.step(1e-4)
    end("first_step")
    early = _workers_memory()
    for _ in range(_BATCHES):
        next(drawn)
    return {
        "stages_s": stages,
        "total_s": round(sum(stages.values()), 2),
        "worker_uss_mib": {"first_batch": early, f"after_{_BATCHES}_more": _workers_memory()},
    }


def _workers_memory() -> int:
    """Unique set size of the largest data worker, in MiB."""
    workers = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    return round(max(worker.memory_full_info().uss for worker in workers) / _MIB)


def look_up(index: ShardIndex) -> dict[str, dict[str, float]]:
    """Median ms for each `LOOKUP_BATCH` samples: to order them, and to find and read their bytes."""
    times = {}
    for name, (lanes, block_shards) in _ORDERS.items():
        order = make_order(
            index, effective_batch_size=LOOKUP_BATCH, seed=0, lanes=lanes, block_shards=block_shards
        )
        ordering, reading = [], []
        # From the middle of the second epoch: no step is easier to find than another.
        first = order.steps_per_epoch * 3 // 2
        positions = micro_batches(order, RankSlice(), start_step=first, stop_step=first + _STEPS)
        for _ in range(_STEPS):
            begun = time.perf_counter()
            _, samples = next(positions)
            ordered = time.perf_counter()
            for sample in samples.tolist():
                index.read(sample)
            ordering.append(ordered - begun)
            reading.append(time.perf_counter() - ordered)
        times[name] = {
            "order_ms": round(1e3 * statistics.median(ordering[1:]), 3),
            "find_and_read_ms": round(1e3 * statistics.median(reading[1:]), 1),
        }
    return times


def main(folder: str) -> None:
    """Measures one start and prints it."""
    overrides = [
        *(f"data.path={folder}", "data.order=global", f"data.workers={WORKERS}"),
        *("data.augment.crop=random_resized", "model.img_size=64", "model.patch_size=8"),
        *("train.engine=torch", "train.epochs=1", "train.warmup_epochs=0", "monitor.probe_queries=0"),
        f"train.precision={choose_precision('auto', torch.device('cpu')).precision}",
    ]
    config = load_config(PretrainConfig, ROOT / "configs" / "pretrain" / "mae_cifar_tiny.yaml", overrides)
    # The workers have ended when the look-ups begin.
    print(json.dumps({**start(config), "look_up": look_up(set_up(config, Ranks()).data.index)}))


if __name__ == "__main__":
    main(sys.argv[1])
