"""torch.compile changes the time of a step, not its numbers."""

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.utils import counters

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder
from mae_vit.keyed import SampleKeys, Stream
from mae_vit.objectives import OBJECTIVES, Objective
from mae_vit.training.distributed import Ranks
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.optimizers import OptimizerOptions
from mae_vit.training.precision import Autocast

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
    "supervised with mixing": {"name": "supervised", "mixup": 0.8, "cutmix": 1.0},
}


def build(name: str) -> Objective:
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(8, 8), patch_size=4, embed_dim=16, depth=1, num_heads=2)
    options = {"name": name, **OPTIONS[name]}
    section = OBJECTIVES[options["name"]].model_validate(options)
    return section.build(encoder, mean=[0.5] * 3, std=[0.25] * 3, num_classes=2)


def batch_of(step: int) -> Batch:
    """Three steps are an epoch."""
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    keys = SampleKeys(0, step // 3, torch.arange(4) + 4 * step)
    return Batch(images, torch.zeros(4, dtype=torch.int64), keys)


def losses(name: str, *, compile: bool) -> list[float]:
    """Five steps, in two epochs."""
    adamw = OptimizerOptions("adamw", 0.05, {"betas": (0.9, 0.95), "eps": 1e-8})
    how = StepOptions(adamw, None, "fp32", 4, 1, compile=compile)
    engine = TorchEngine(build(name), how, Ranks(), torch.device("cpu"))
    found = []
    for step in range(5):
        output = engine.forward(batch_of(step))
        engine.backward(output.loss)
        engine.step(1e-2)
        found.append(output.loss.item())
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_without_breaks_for_all_epochs(name):
    """What dynamo traces; the graph is then run as it is, so that no compiler is needed."""
    dynamo.reset()
    counters.clear()
    objective = build(name)
    objective.compile(backend="eager", dynamic=False)
    module = Autocast(objective, torch.device("cpu"), "bf16")
    with dynamo.config.patch(error_on_recompile=True):
        for step in range(5):
            torch.manual_seed(step)
            batch = batch_of(step)
            output = module(batch)
            output.loss.backward()
            assert torch.equal(output.loss, Autocast(build(name), torch.device("cpu"), "bf16")(batch).loss)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_for_all_epochs_with_the_same_losses(name):
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch(error_on_recompile=True):
        compiled = losses(name, compile=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled == pytest.approx(losses(name, compile=False), rel=1e-5)


def test_compiled_graphs_draw_the_same_words():
    """Of the whole range of seeds and epochs; by dynamo alone, so that no compiler is needed."""
    for seed, epoch in ((0, 0), (2**40 + 3, 7), (2**64 - 1, 2**32 - 1)):
        keys = SampleKeys(seed, epoch, torch.tensor([0, 1, 2**32 - 1]))

        def draw(keys: SampleKeys) -> torch.Tensor:
            return keys.words(Stream.MASK, 5)

        traced = torch.compile(draw, backend="eager", fullgraph=True)(keys.for_compiled())
        assert torch.equal(traced, draw(keys))
