"""The loop gives a device its work and reads nothing back but what is a step old, and log lines.

On a CPU nothing shows in time; what would make a GPU wait is told by its operations.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mae_vit.batch import Batch
from mae_vit.config import GuardSection
from mae_vit.encoder import ViTEncoder
from mae_vit.keyed import SampleKeys
from mae_vit.objectives import OBJECTIVES
from mae_vit.plan import Plan
from mae_vit.training.distributed import Ranks
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.guard import Course, Guard
from mae_vit.training.loop import train
from mae_vit.training.optimizers import OptimizerOptions

OPTIONS = {
    "mae": {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2},
    "mae decoding a half": {
        "name": "mae",
        "decode_ratio": 0.5,
        "decoder_embed_dim": 16,
        "decoder_depth": 1,
        "decoder_num_heads": 2,
    },
    "masked_patch": {},
    "joint": {"mae": {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}},
    "simmim": {},
    "supervised": {},
}
# What returns a number, or a shape that depends on numbers, to the host; and `lift_fresh`,
# by which `torch.tensor(..., device=...)` brings the host's numbers to the device.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh")


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


class Recorded(SimpleNamespace):
    """Hooks that log steps and do nothing else."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def stop_requested(self) -> bool:
        return False

    def note_damage(self, step, found) -> int:
        return 0

    def log(self, line) -> None:
        self.lines.append(line)


def take_steps(name: str, steps: int, *, log_every: int) -> tuple[Counter, list]:
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(8, 8), patch_size=4, embed_dim=16, depth=1, num_heads=2)
    options = {"name": name, **OPTIONS[name]}
    section = OBJECTIVES[options["name"]].model_validate(options)
    objective = section.build(encoder, mean=[0.5] * 3, std=[0.25] * 3, num_classes=5)
    adamw = OptimizerOptions("adamw", 0.05, {"betas": (0.9, 0.95), "eps": 1e-8})
    engine = TorchEngine(objective, StepOptions(adamw, 1.0, "bf16", 4, 2), Ranks(), torch.device("cpu"))
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(4)

    def batches():
        for number in range(2 * steps):
            yield Batch(images, labels, SampleKeys(0, number // 4, torch.arange(4) + 4 * number))

    never = 10**6
    plan = Plan(1000, 125, steps + 1, 0, 8, 4, 2, 1e-3, 0, never, never)
    hooks, waits = Recorded(lines=[]), Waits()
    guard = Guard(GuardSection(), Course())
    # The batches end before the plan does: its last step would be logged.
    with waits, pytest.raises(StopIteration):
        train(
            engine,
            batches(),
            hooks,
            guard,
            plan=plan,
            rate=lambda step: 1e-3,
            start_step=0,
            log_every_steps=log_every,
        )
    return waits.found, hooks.lines


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits_for_the_device_between_log_steps(name):
    found, lines = take_steps(name, 4, log_every=100)
    assert not lines
    assert found == {}


def test_what_waits_is_found():
    waits = Waits()
    with waits:
        values = torch.tensor([1.0, 2.0])
        values.sum().item()
        bool(values.isfinite().all())
        values[values > 1]
    assert waits.found == {"lift_fresh": 1, "_local_scalar_dense": 2, "index": 1}


def test_log_steps_are_logged():
    _, lines = take_steps("mae", 4, log_every=2)
    assert [line["step"] for line in lines] == [2, 4]
