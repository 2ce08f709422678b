"""Steps of the loop through an engine, with what would make a GPU wait counted by its name.

On a CPU nothing shows in time; operations and calls tell it. Run as a program it takes the steps
of its argument, a JSON list of (objective, ZeRO stage), through DeepSpeed on one rank and prints
the counts: `test_no_device_sync.py` starts it, since ZeRO 3 changes torch for good.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mae_vit import testing
from mae_vit.config.plan import Plan
from mae_vit.config.schema import GuardSection
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.objectives.objective import Objective
from mae_vit.runtime.process_group import give_up_after, join
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.runtime.watchdog import Watchdog
from mae_vit.training.engines.base import Engine, StepOptions
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions
from mae_vit.training.recovery import Recovery
from mae_vit.training.trainer import Trainer

DECODER = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
OPTIONS = {
    "mae": DECODER,
    "mae decoding a half": {"name": "mae", "decode_ratio": 0.5, **DECODER},
    "contrastive": {"group_size": 2},
    "contrastive_mae": {**DECODER, "group_size": 2},
    "masked_patch": {},
    "joint": {"mae": DECODER},
    "simmim": {},
    "supervised": {},
}
MODEL = {"name": "tiny-cifar", "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
# What returns a number, or a shape that depends on numbers, to the host; and `lift_fresh`,
# by which `torch.tensor(..., device=...)` brings the host's numbers to the device.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh")
ACCUMULATION = 2


class Waits(TorchDispatchMode):
    """Counts operations that make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITING or by_mask:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(*synchronizers: tuple[object, str]) -> Iterator[Counter[str]]:
    """Counts waits while it is open: those of operations, and calls of what waits outright.

    Args:
        synchronizers: besides `torch.cuda.synchronize`, as owner and attribute.
    """
    waits = Waits()

    def note(*args: object, **kwargs: object) -> None:
        waits.found["synchronize"] += 1

    with ExitStack() as stack:
        for owner, name in ((torch.cuda, "synchronize"), *synchronizers):
            stack.enter_context(patch.object(owner, name, note))
        with waits:
            yield waits.found


def build_objective(name: str) -> Objective:
    """A small objective of `OPTIONS`."""
    return testing.build_objective({"name": name, **OPTIONS[name]}, MODEL)


def step_options(zero_stage: int = 0) -> StepOptions:
    """Clipped AdamW in bf16, over two groups of parameters."""
    adamw = OptimizerOptions("adamw", 0.05, betas=(0.9, 0.95))
    return StepOptions(adamw, 1.0, "bf16", 4, ACCUMULATION, zero_stage=zero_stage)


def take_steps(engine: Engine, steps: int, *, log_every: int) -> list:
    """Trains for some steps by the run's own loop; returns the lines that it logs."""
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(4)

    def batches():
        for number in range(ACCUMULATION * steps):
            yield Batch(images, labels, SampleKeys(0, number // 4, torch.arange(4) + 4 * number))

    never = 10**6
    plan = Plan(1000, 125, steps + 1, 0, 8, 4, ACCUMULATION, 1e-3, never, never)
    config = SimpleNamespace(
        monitor=SimpleNamespace(log_every_steps=log_every),
        optim=SimpleNamespace(schedule="cosine", min_lr=0.0),
        train=SimpleNamespace(precision="bf16"),
        guard=GuardSection(),
    )
    costs, lines = SimpleNamespace(flops_per_image=0), []
    trainer = Trainer(
        SimpleNamespace(config=config, plan=plan, costs=costs, batches=lambda *_: batches()),
        engine,
        None,
        evals=SimpleNamespace(run=lambda *_: {}),
        outputs=SimpleNamespace(log=lines.append, show_step=lambda *_: None),
        recovery=Recovery(
            config.guard,
            None,
            identity={},
            folder=None,
            samples_of=None,
            quarantine=SimpleNamespace(note=lambda *_: 0),
            ranks=engine.ranks,
            say=print,
        ),
        saver=SimpleNamespace(due=lambda: False, take_stall=dict),
        stop=False,
        watchdog=Watchdog(None, rank=0),
    )
    # The batches end before the plan does: its last step would be logged.
    try:
        trainer.train(0)
    except StopIteration:
        return lines
    raise AssertionError("the plan ended before the batches")


def torch_engine(name: str) -> TorchEngine:
    """The plain engine, on one process."""
    return TorchEngine(build_objective(name), step_options(), Ranks(), torch.device("cpu"))


def main() -> None:
    from deepspeed.accelerator import get_accelerator

    from mae_vit.training.engines.deepspeed_engine import DeepSpeedEngine

    cpu, ranks = torch.device("cpu"), find_ranks()
    join(ranks, cpu, timeout=give_up_after(None))
    results = []
    for name, stage in json.loads(sys.argv[1]):
        engine = DeepSpeedEngine(build_objective(name), step_options(stage), ranks, cpu)
        # Optimizer states are made at the first step.
        take_steps(engine, 1, log_every=100)
        with counted((type(get_accelerator()), "synchronize")) as waits:
            lines = take_steps(engine, 4, log_every=100)
        results.append({"found": dict(waits), "lines": lines})
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
