"""torch.compile changes the time of a step, not its numbers."""

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.utils import counters

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder
from mae_vit.keyed import SampleKeys
from mae_vit.objectives import OBJECTIVES
from mae_vit.training.distributed import Ranks
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.optimizers import OptimizerOptions

OPTIONS = {
    "mae": {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2},
    "masked_patch": {},
}


def losses(name: str, *, compile: bool) -> list[float]:
    """Five steps, in two epochs."""
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(8, 8), patch_size=4, embed_dim=16, depth=1, num_heads=2)
    section = OBJECTIVES[name].model_validate({"name": name, **OPTIONS[name]})
    objective = section.build(encoder, mean=[0.5] * 3, std=[0.25] * 3)
    adamw = OptimizerOptions("adamw", 0.05, {"betas": (0.9, 0.95), "eps": 1e-8})
    options = StepOptions(adamw, None, "fp32", 4, 1, compile=compile)
    engine = TorchEngine(objective, options, Ranks(), torch.device("cpu"))
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    found = []
    for step in range(5):
        keys = SampleKeys(0, step // 3, torch.arange(4) + 4 * step)
        output = engine.forward(Batch(images, torch.zeros(4, dtype=torch.int64), keys))
        engine.backward(output.loss)
        engine.step(1e-2)
        found.append(output.loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae", "masked_patch"])
def test_same_losses_without_recompilation(name):
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch(error_on_recompile=True):
        compiled = losses(name, compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert compiled == pytest.approx(losses(name, compile=False), rel=1e-5)
