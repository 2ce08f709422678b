"""Kernels of attention against each other; Triton's runs in its interpreter, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mae_vit.core.errors import InputError
from mae_vit.models.attention import PlainOrFusedAttention, choose_attention, fused_by

CPU = torch.device("cpu")
WORKER = Path(__file__).parents[2] / "workers" / "interpret_short_attention.py"
# Encoder and decoder of Ti/4, B/16, H/14; the last decoder block; fewer tokens and channels than a tile.
SIZES = ("17,17,3,64", "50,50,2,64", "65,65,1,80", "197,147,1,32", "257,257,1,32", "5,5,2,8")


def test_triton_equals_the_definition_in_float64():
    pytest.importorskip("triton")
    bounds = {"module": 1e-6} | {
        f"{sizes},{dtype}": bound
        for sizes in SIZES
        for dtype, bound in (("float32", 1e-6), ("float16", 1e-3))
    }
    done = subprocess.run(
        [sys.executable, WORKER, *list(bounds)[1:]], check=True, capture_output=True, text=True
    )
    errors = json.loads(done.stdout)
    assert errors.keys() == bounds.keys()
    assert {case: error for case, error in errors.items() if not error < bounds[case]} == {}


def test_keys_are_cut_with_little_over():
    short = pytest.importorskip("mae_vit.models.short_attention")
    cut = {17: (32, 0, 0), 50: (64, 0, 0), 65: (64, 16, 0), 197: (128, 64, 16), 257: (128, 128, 16)}
    assert {n: short._chunks(n) for n in cut} == cut
    assert all(sum(short._chunks(n)) >= n for n in range(1, short.MAX_TOKENS + 1))
    with pytest.raises(InputError, match="at most 384 tokens, not 400"):
        short.short_attention(torch.zeros(1, 400, 3, 1, 16))


@pytest.mark.parametrize("kernel", ["plain", "flash"])
def test_the_kernels_of_a_cpu_compute_the_same(kernel):
    torch.manual_seed(0)
    attention = PlainOrFusedAttention(32, num_heads=2, qkv_bias=True)
    x = torch.randn(3, 20, 32, requires_grad=True)
    ids = torch.stack([torch.randperm(20)[:7] for _ in range(3)])

    def results(kernel):
        choose_attention(attention, CPU, kernel)
        with fused_by(kernel):
            whole, some = attention(x), attention.forward_queries(x, ids)
        return whole, some, *torch.autograd.grad(whole.square().sum() + some.sum(), [x, attention.qkv.weight])

    for result, expected in zip(results(kernel), results("auto"), strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert not attention.fused_attn  # what a CPU computes by itself


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "triton"])
def test_a_kernel_that_a_cpu_lacks_is_refused(kernel):
    with pytest.raises(
        InputError, match=f"^train.attention={kernel} needs a GPU; a CPU has plain and flash$"
    ):
        choose_attention(PlainOrFusedAttention(8, num_heads=1), CPU, kernel)


def test_triton_is_refused_where_the_encoder_attends_by_itself():
    with pytest.raises(InputError, match="this encoder has an attention of its own"):
        choose_attention(torch.nn.Linear(2, 2), torch.device("cuda"), "triton")


def test_a_named_kernel_is_the_only_one():
    with fused_by("cudnn"):
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(RuntimeError), fused_by("efficient"):  # a CPU has none
        F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 2, 8))
