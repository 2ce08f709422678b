"""Twenty steps through an engine, on the ranks of the environment: prints losses as JSON.

Not a test: `test_engine_oracle.py` starts it. Arguments: engine, ZeRO stage,
precision, accumulation, clip (0 for none).
"""

import json
import sys

import torch

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder
from mae_vit.keyed import SampleKeys
from mae_vit.objectives import OBJECTIVES
from mae_vit.training.distributed import find_device, find_ranks
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.optimizers import OptimizerOptions
from mae_vit.training.schedule import rate_at

STEPS, BATCH = 20, 16


def build_objective():
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(16, 16), patch_size=4, embed_dim=32, depth=2, num_heads=2)
    section = OBJECTIVES["mae"].model_validate(
        {"name": "mae", "decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2}
    )
    return section.build(encoder, mean=[0.5] * 3, std=[0.25] * 3)


def batch_of(step: int, start: int = 0, stop: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (BATCH, 3, 16, 16), dtype=torch.uint8, generator=generator)
    index = torch.arange(step * BATCH, (step + 1) * BATCH)
    return Batch(images[start:stop], torch.zeros(stop - start).long(), SampleKeys(0, 0, index[start:stop]))


def rate(step: int) -> float:
    return rate_at(step, schedule="cosine", peak=3e-3, warmup_steps=4, total_steps=STEPS)


def main() -> None:
    engine_name, zero_stage, precision, accumulation, clip = sys.argv[1:6]
    ranks = find_ranks()
    device = find_device(ranks)
    torch.set_num_threads(1)
    share = BATCH // ranks.world_size
    micro = share // int(accumulation)
    options = StepOptions(
        optimizer=OptimizerOptions("adamw", 0.05, {"betas": (0.9, 0.95), "eps": 1e-8}),
        zero_keeps_whole_below=0,
        clip_grad=float(clip) or None,
        precision=precision,
        batch_size_per_device=micro,
        accumulation=int(accumulation),
        zero_stage=int(zero_stage),
    )
    if engine_name == "torch":
        engine = TorchEngine(build_objective(), options, ranks, device)
    else:
        from mae_vit.training.deepspeed_engine import DeepSpeedEngine, init_process_group

        init_process_group(device)
        engine = DeepSpeedEngine(build_objective(), options, ranks, device)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for number in range(int(accumulation)):
            start = ranks.rank * share + number * micro
            loss = engine.forward(batch_of(step, start, start + micro).to(device)).loss
            engine.backward(loss)
            total += loss.detach() / int(accumulation)
        norms.append(float(engine.step(rate(step)).grad_norm))
        losses.append(float(engine.all_reduce_sum(total)) / ranks.world_size)
        if step == 9:
            # Through a gathered state and back, as a resumed run would go.
            engine.restore(engine.gather())
    if ranks.rank == 0:
        print("RESULT", json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    main()
