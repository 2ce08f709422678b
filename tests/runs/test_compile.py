"""torch.compile changes the time of a step, not its numbers."""

import pytest
import torch
import torch._dynamo as dynamo
from helpers.objectives import model_of, options_of
from torch._dynamo.utils import counters

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import RngStream, SampleKeys
from mae_vit.finetuning.models.classifiers import NetworkClassifier
from mae_vit.models.encoders.baselines import BASELINES
from mae_vit.objectives import OBJECTIVES
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.objectives.objective import Task
from mae_vit.runtime.ranks import Ranks
from mae_vit.testing import build_objective
from mae_vit.training.engines.base import StepOptions, recompute_blocks
from mae_vit.training.engines.precision import Autocast
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions

# Alone they are traced as they are together.
ALONE = ("mae, recomputed", "mae, noise")
NAMES = (*OBJECTIVES, "mae decoding a half", "supervised mixed", *ALONE, "mae, noise, recomputed")
# Networks that fine-tuning trains.
CNNS = ("SimpleCNN", "SmallResNet", "SmallBiT")


def build(name: str) -> Task:
    torch.manual_seed(0)
    common = {"mean": [0.5] * 3, "std": [0.25] * 3}
    if name in CNNS:
        return NetworkClassifier(
            BASELINES[name](2, 3, 0.0), labels=LabelLoss(2, label_smoothing=0.1), **common
        )
    name, *changes = name.split(", ")
    noise = {"drop_rate": 0.1, "drop_path_rate": 0.2} if "noise" in changes else {"depth": 1}
    objective = build_objective(options_of(name), model_of("tiny") | noise)
    if "recomputed" in changes:
        recompute_blocks(objective)
    return objective


def batch_of(step: int) -> Batch:
    """Three steps are an epoch."""
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    keys = SampleKeys(0, step // 3, torch.arange(4) + 4 * step)
    return Batch(images, torch.zeros(4, dtype=torch.int64), keys)


def losses(name: str, *, compile: bool) -> list[float]:
    """Five steps, in two epochs."""
    adamw = OptimizerOptions("adamw", 0.05, betas=(0.9, 0.95))
    how = StepOptions(adamw, None, "fp32", 4, 1, compile=compile)
    engine = TorchEngine(build(name), how, Ranks(), torch.device("cpu"))
    values = []
    for step in range(5):
        output = engine.forward(batch_of(step))
        engine.backward(output.loss)
        engine.step(1e-2)
        values.append(output.loss.item())
    return values


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ALONE else name for name in (*NAMES, *CNNS)],
)
def test_one_graph_without_breaks_for_all_epochs(name):
    """What dynamo traces; the graph is then run as it is, so that no compiler is needed."""
    dynamo.reset()
    counters.clear()
    objective, plain = build(name), build(name)
    objective.compile(backend="eager", dynamic=False)
    compiled, eager = (Autocast(task, torch.device("cpu"), "bf16") for task in (objective, plain))
    with dynamo.config.patch(error_on_recompile=True):
        for step in range(5):
            batch, outputs = batch_of(step), []
            for module in (compiled, eager):
                torch.manual_seed(step)
                outputs.append(module(batch).loss)
                outputs[-1].backward()
            assert torch.equal(*outputs)
            if step == 2:
                objective.eval()
                with torch.no_grad():
                    objective.evaluation_sums(batch)
                objective.train()
    # Dynamo leaves it to a real backend to draw the same noise again.
    for ours, theirs in zip(objective.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None or name == "mae, noise, recomputed" or torch.equal(ours.grad, theirs.grad)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mae", "mae decoding a half", "masked_patch", "supervised mixed", "SmallResNet"]
)
def test_one_graph_for_all_epochs_with_the_same_losses(name):
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch(error_on_recompile=True):
        compiled = losses(name, compile=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    # Convolutions of another library.
    rel = 1e-4 if name in CNNS else 1e-5
    assert compiled == pytest.approx(losses(name, compile=False), rel=rel)


def test_compiled_graphs_draw_the_same_words():
    """Of the whole range of seeds and epochs; by dynamo alone, so that no compiler is needed."""
    for seed, epoch in ((0, 0), (2**40 + 3, 7), (2**64 - 1, 2**32 - 1)):
        keys = SampleKeys(seed, epoch, torch.tensor([0, 1, 2**32 - 1]))

        def draw(keys: SampleKeys) -> torch.Tensor:
            return keys.random_uint32_of_each((RngStream.MASK, RngStream.CORRUPT_KIND), 5)

        traced = torch.compile(draw, backend="eager", fullgraph=True)(keys.for_compiled())
        assert torch.equal(traced, draw(keys))
