"""Twenty steps through engines, on the ranks of the environment: prints losses as JSON.

Not a test: `test_against_plain_loop.py` starts it. Its argument is a JSON list of cases;
what a case leaves out is in `CASE`.
"""

import json
import sys
from collections.abc import Iterable
from functools import partialmethod

import torch
import torch.nn.functional as F
from torch import nn

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives import OBJECTIVES
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.runtime.device import find_device
from mae_vit.runtime.process_group import give_up_after, join
from mae_vit.runtime.ranks import Ranks, broadcast_from_rank_zero, find_ranks, gather_objects
from mae_vit.training.engines import base
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.state import LossScale
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions, lr_at

STEPS, BATCH = 20, 16

# `engines` share the steps, each beginning with the gathered state of the one before:
# "torch", or DeepSpeed by its ZeRO stage.
CASE = {
    "engines": ["torch"],
    "precision": "fp32",
    "accumulation": 1,
    "clip": 0.0,
    "optimizer": "adamw",
    "objective": "mae",
    "recompute": False,
    "scale": 65536.0,
    "ema": None,
    "compile": False,
}
# Options and peak rate.
OPTIMIZERS = {
    "adamw": ({"betas": (0.9, 0.95)}, 3e-3),
    "adam": ({"betas": (0.9, 0.999)}, 3e-3),
    "sgd": ({"momentum": 0.9}, 0.05),
    "sgd without momentum": ({"momentum": 0.0}, 0.3),
    "lars": ({"momentum": 0.9}, 3.0),
    "muon": ({"betas": (0.9, 0.95), "momentum": 0.95}, 3e-3),
}
OBJECTIVE_OPTIONS = {
    **{name: {"group_size": 4} for name in ("contrastive", "contrastive_mae")},
    "mae": {"decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2},
    "joint": {
        "mae": {"decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2},
    },
}
WEIGHT_DECAY = 0.05
# Tensors that were copied to the host since the last save.
COPIED: list = []
# Overflows of fp16 and growth again, within twenty steps.
GROWTH_INTERVAL = 5


class Normed(Task):
    """A network whose layers keep statistics."""

    def __init__(self) -> None:
        super().__init__(mean=[0.5] * 3, std=[0.25] * 3)
        sizes = (3 * 16 * 16, 16, 5)
        self.layers = nn.Sequential(
            nn.Linear(*sizes[:2]), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(*sizes[1:])
        )

    def forward(self, batch: Batch) -> ObjectiveOutput:
        scores = self.layers(self.normalize(batch.images).flatten(1))
        return ObjectiveOutput(F.cross_entropy(scores, batch.labels))

    def evaluation_sums(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.eval()
        return {"loss": self(batch).loss}

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return sums

    def pictures(self, batch: Batch) -> list:
        return []


def build_objective(name: str = "mae"):
    torch.manual_seed(0)
    if name == "normed":
        return Normed()
    encoder = ViTEncoder(img_size=(16, 16), patch_size=4, embed_dim=32, depth=2, num_heads=2)
    section = OBJECTIVES[name].model_validate({"name": name, **OBJECTIVE_OPTIONS.get(name, {})})
    return section.build(encoder, mean=[0.5] * 3, std=[0.25] * 3, num_classes=5)


def batch_of(step: int, start: int = 0, stop: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (BATCH, 3, 16, 16), dtype=torch.uint8, generator=generator)
    index = torch.arange(step * BATCH, (step + 1) * BATCH)
    return Batch(images[start:stop], index[start:stop] % 5, SampleKeys(0, 0, index[start:stop]))


def rate(step: int, case: dict) -> float:
    return lr_at(
        step,
        peak_lr=OPTIMIZERS[case["optimizer"]][1],
        warmup_steps=4,
        total_steps=STEPS,
        min_lr=1e-5,
    )


def build_engine(name: str, case: dict, ranks: Ranks):
    device = find_device(ranks)
    torch.set_num_threads(1)
    options = StepOptions(
        optimizer=OptimizerOptions(
            "sgd" if "sgd" in case["optimizer"] else case["optimizer"],
            WEIGHT_DECAY,
            **OPTIMIZERS[case["optimizer"]][0],
        ),
        clip_grad=case["clip"] or None,
        precision=case["precision"],
        batch_size_per_device=BATCH // ranks.world_size // case["accumulation"],
        accumulation=case["accumulation"],
        zero_stage=0 if name == "torch" else int(name),
        # So that these small parameters are sharded at all.
        zero_keeps_whole_below=0,
        activation_checkpointing=case["recompute"],
        ema_decay=case["ema"],
        compile=case["compile"],
    )
    objective = build_objective(case["objective"])
    if name == "torch":
        engine = TorchEngine(objective, options, ranks, device)
    else:
        from mae_vit.training.engines.deepspeed_engine import DeepSpeedEngine

        engine = DeepSpeedEngine(objective, options, ranks, device)
    if engine.loss_scale is not None:
        engine.loss_scale = LossScale(case["scale"], growth_interval=GROWTH_INTERVAL)
        engine.restore(broadcast_from_rank_zero(engine.gather(), ranks))
    return engine


def tensors_of(state) -> int:
    groups = [state.parameters, *state.optimizer_states.values(), state.buffers, state.average]
    return sum(map(len, groups))


def count_copies() -> None:
    to_host = base.to_host

    def counted(*arguments, **options):
        COPIED.append(arguments)
        return to_host(*arguments, **options)

    base.to_host = counted


def spread(tensors: Iterable[torch.Tensor]) -> float:
    """How far numbers of different ranks lie apart."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    least, most = flat.clone(), flat.clone()
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return float((most - least).max())


def run(case: dict, ranks: Ranks) -> dict:
    losses, norms, skips, shared, state = [], [], [], [], None
    share = BATCH // ranks.world_size
    micro = share // case["accumulation"]
    for number, name in enumerate(case["engines"]):
        engine = build_engine(name, case, ranks)
        if state is not None:
            engine.restore(state)
        count = len(case["engines"])
        for step in range(number * STEPS // count, (number + 1) * STEPS // count):
            total = torch.zeros((), device=engine.device)
            for part in range(case["accumulation"]):
                start = ranks.rank * share + part * micro
                loss = engine.forward(batch_of(step, start, start + micro).to(engine.device)).loss
                engine.backward(loss)
                total += loss.detach() / case["accumulation"]
                if step == 0 and name == "torch":
                    shared.append(spread(p.grad for p in engine.trainable.values()) == 0.0)
            result = engine.step(rate(step, case))
            norms.append(float(result.grad_norm))
            skips.append(result.skipped)
            losses.append(float(engine.all_reduce_sum(total)) / ranks.world_size)
        state = engine.gather()
        held = gather_objects(tensors_of(state), ranks)
        copied = gather_objects(len(COPIED), ranks)
        COPIED.clear()
        state = broadcast_from_rank_zero(state, ranks)
    # At ZeRO 3 they are sharded.
    apart = spread(engine.objective.parameters()) if name != "3" else 0.0
    with engine.full_weights(), torch.no_grad():
        sums = engine.objective.evaluation_sums(batch_of(STEPS).to(engine.device))
    return {
        "losses": losses,
        "norms": norms,
        "skips": skips,
        "shared": shared,
        "apart": apart,
        "scale": engine.loss_scale.scale if engine.loss_scale else None,
        # Of the last engine's state, rank by rank.
        "held": held,
        "copied": copied,
        "evaluation": engine.objective.evaluation_metrics({name: float(v) for name, v in sums.items()}),
    }


def main() -> None:
    ranks = find_ranks()
    join(ranks, find_device(ranks), timeout=give_up_after(None))
    count_copies()
    # What compiles here is how graphs are made and run; no code is generated.
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")
    results = [run(CASE | case, ranks) for case in json.loads(sys.argv[1])]
    if ranks.rank == 0:
        print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
