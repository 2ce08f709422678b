"""Twenty steps through engines, on the ranks of the environment: prints losses as JSON.

Not a test: `test_engine_oracle.py` starts it. Its argument is a JSON list of cases;
what a case leaves out is in `CASE`.
"""

import json
import sys

import torch

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder
from mae_vit.keyed import SampleKeys
from mae_vit.objectives import OBJECTIVES
from mae_vit.training.distributed import Ranks, find_device, find_ranks
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.optimizers import OptimizerOptions
from mae_vit.training.precision import LossScale
from mae_vit.training.schedule import rate_at

STEPS, BATCH = 20, 16

# `engines` share the steps, each beginning with the gathered state of the one before:
# "torch", or DeepSpeed by its ZeRO stage.
CASE = {
    "engines": ["torch"],
    "precision": "fp32",
    "accumulation": 1,
    "clip": 0.0,
    "optimizer": "adamw",
    "schedule": "cosine",
    "objective": "mae",
    "recompute": False,
    "scale": 65536.0,
    "ema": None,
}
# Options and peak rate.
OPTIMIZERS = {
    "adamw": ({"betas": (0.9, 0.95), "eps": 1e-8}, 3e-3),
    "adam": ({"betas": (0.9, 0.999), "eps": 1e-8}, 3e-3),
    "sgd": ({"momentum": 0.9, "nesterov": False}, 0.05),
    "nesterov": ({"momentum": 0.9, "nesterov": True}, 0.05),
    "sgd without momentum": ({"momentum": 0.0, "nesterov": False}, 0.3),
    "lars": ({"momentum": 0.9, "trust_coefficient": 0.001}, 3.0),
}
OBJECTIVE_OPTIONS = {
    "mae": {"decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2},
    "joint": {
        "mode": "alternate",
        "mae": {"decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2},
    },
}
WEIGHT_DECAY = 0.05
# Overflows of fp16 and growth again, within twenty steps.
GROWTH_INTERVAL = 5


def build_objective(name: str = "mae"):
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(16, 16), patch_size=4, embed_dim=32, depth=2, num_heads=2)
    section = OBJECTIVES[name].model_validate({"name": name, **OBJECTIVE_OPTIONS.get(name, {})})
    return section.build(encoder, mean=[0.5] * 3, std=[0.25] * 3, num_classes=5)


def batch_of(step: int, start: int = 0, stop: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (BATCH, 3, 16, 16), dtype=torch.uint8, generator=generator)
    index = torch.arange(step * BATCH, (step + 1) * BATCH)
    return Batch(images[start:stop], index[start:stop] % 5, SampleKeys(0, 0, index[start:stop]))


def rate(step: int, case: dict) -> float:
    return rate_at(
        step,
        schedule=case["schedule"],
        peak=OPTIMIZERS[case["optimizer"]][1],
        warmup_steps=4,
        total_steps=STEPS,
        min_rate=1e-5,
        decay_steps=6,
    )


def build_engine(name: str, case: dict, ranks: Ranks):
    device = find_device(ranks)
    torch.set_num_threads(1)
    options = StepOptions(
        optimizer=OptimizerOptions(
            {"nesterov": "sgd", "sgd without momentum": "sgd"}.get(case["optimizer"], case["optimizer"]),
            WEIGHT_DECAY,
            OPTIMIZERS[case["optimizer"]][0],
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
    )
    objective = build_objective(case["objective"])
    if name == "torch":
        engine = TorchEngine(objective, options, ranks, device)
    else:
        from mae_vit.training.deepspeed_engine import DeepSpeedEngine, init_process_group

        if not torch.distributed.is_initialized():
            init_process_group(device)
        engine = DeepSpeedEngine(objective, options, ranks, device)
    if engine.loss_scale is not None:
        engine.loss_scale = LossScale(case["scale"], growth_interval=GROWTH_INTERVAL)
        engine.restore(engine.gather())
    return engine


def run(case: dict, ranks: Ranks) -> dict:
    losses, norms, skips, state = [], [], [], None
    share = BATCH // ranks.world_size
    micro = share // case["accumulation"]
    for number, name in enumerate(case["engines"]):
        engine = build_engine(name, case, ranks)
        if state is not None:
            engine.restore(state)
        count = len(case["engines"])
        for step in range(number * STEPS // count, (number + 1) * STEPS // count):
            engine.objective.begin_step(step)
            total = torch.zeros((), device=engine.device)
            for part in range(case["accumulation"]):
                start = ranks.rank * share + part * micro
                loss = engine.forward(batch_of(step, start, start + micro).to(engine.device)).loss
                engine.backward(loss)
                total += loss.detach() / case["accumulation"]
            result = engine.step(rate(step, case))
            norms.append(float(result.grad_norm))
            skips.append(result.skipped)
            losses.append(float(engine.all_reduce_sum(total)) / ranks.world_size)
        state = engine.gather()
    with engine.whole(), torch.no_grad():
        sums = engine.objective.evaluation_sums(batch_of(STEPS).to(engine.device))
    return {
        "losses": losses,
        "norms": norms,
        "skips": skips,
        "scale": engine.loss_scale.scale if engine.loss_scale else None,
        "evaluation": engine.objective.evaluation_metrics({name: float(v) for name, v in sums.items()}),
    }


def main() -> None:
    ranks = find_ranks()
    results = [run(CASE | case, ranks) for case in json.loads(sys.argv[1])]
    if ranks.rank == 0:
        print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
