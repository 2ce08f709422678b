"""What a step asks of a GPU, counted on a CPU by its operations: few of them, and none in a loop over images."""

from collections import Counter

import pytest
import torch
from helpers.objectives import model_of, options_of
from torch.utils._python_dispatch import TorchDispatchMode

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.attention import PlainOrFusedAttention, choose_attention, set_fused_attention
from mae_vit.runtime.ranks import Ranks
from mae_vit.testing import build_objective
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions

DECODER = {"decoder_embed_dim": 16, "decoder_depth": 8, "decoder_num_heads": 2}
CHANGES = {
    **{"mae": DECODER, "mae decoding a half": DECODER, "joint": {"mae": DECODER}},
    "contrastive_mae": {**DECODER, "contrast_weight": 0.1},
}
# Launches of a step of ViT-B's depth (12 blocks, 8 of MAE's decoder) in forward pass, backward pass and optimizer
# (torch 2.15). Fewer are welcome: lower the number. Of the 5 us that each takes the host a step of ViT-B has some 7 ms.
BUDGETS = {
    "mae": (583, 699, 12),
    "mae decoding a half": (585, 695, 12),
    "contrastive": (295, 436, 12),
    "contrastive_mae": (628, 735, 12),
    "masked_patch": (453, 428, 12),
    "joint": (947, 1177, 12),
    "simmim": (398, 417, 12),
    "supervised mixed": (449, 412, 12),
}
# Operations that CUDA runs image by image, a kernel or more for each (torch 2.15, aten/src/ATen/native/cuda:
# Im2Col.cu, ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu, NaiveDilatedConvolution.cu).
BY_IMAGE = ("im2col", "_slow_conv2d_forward", "slow_conv_transpose2d", "slow_conv_dilated2d")
# Memory without a kernel, a view by another name, and the profiler's marks.
WITHOUT_KERNEL = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_record_function_enter_new", "_record_function_exit"),
)


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy something; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in WITHOUT_KERNEL:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def count(name: str) -> dict[str, Counter[str]]:
    """Launches of the parts of a bf16 step; of the second one, which sets nothing up."""
    objective = build_objective(options_of(name, **CHANGES.get(name, {})), {**model_of("tiny"), "depth": 12})
    adamw = OptimizerOptions("adamw", 0.05, betas=(0.9, 0.95))
    engine = TorchEngine(objective, StepOptions(adamw, 1.0, "bf16", 4, 1), Ranks(), torch.device("cpu"))
    # As on a GPU.
    set_fused_attention(objective, True)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    for step in range(2):
        batch = Batch(images, torch.arange(4), SampleKeys(0, 0, torch.arange(4) + 4 * step))
        forward, backward, optimizer = Launches(), Launches(), Launches()
        with forward:
            output = engine.forward(batch)
        with backward:
            engine.backward(output.loss)
        with optimizer:
            engine.step(1e-3)
    return {"forward": forward.found, "backward": backward.found, "optimizer": optimizer.found}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_stays_within_its_budget_of_launches(name):
    step = count(name)
    for (part, launches), budget in zip(step.items(), BUDGETS[name], strict=True):
        assert launches.total() <= budget, (part, launches.most_common())
        assert not launches.keys() & set(BY_IMAGE), part


@pytest.mark.parametrize(("kernel", "copies"), [("flash", False), ("plain", True)])
def test_fused_attention_copies_no_queries_keys_or_values(kernel, copies):
    attention = PlainOrFusedAttention(16, num_heads=2, qkv_bias=True)
    choose_attention(attention, torch.device("cpu"), kernel)
    x, ids = torch.randn(2, 5, 16), torch.arange(3).repeat(2, 1)
    for attend in (lambda: attention(x), lambda: attention.forward_queries(x, ids)):
        with Launches() as launches:
            attend()
        assert bool(launches.found.keys() & {"clone", "copy_", "_to_copy", "cat"}) == copies
