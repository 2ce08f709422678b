"""Kernels of attention against each other."""

from functools import partial

import pytest
import timm.models.eva
import torch
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from mae_vit.core.errors import InputError
from mae_vit.models import attention as attention_module
from mae_vit.models.attention import PlainOrFusedAttention, choose_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", ["plain", "flash"])
def test_the_kernels_of_a_cpu_compute_the_same(kernel):
    compare(kernel, "auto", CPU, torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash", "efficient"])
def test_the_kernels_of_a_gpu_compute_the_same(kernel):
    compare(kernel, "plain", torch.device("cuda", 0), torch.float16, 1e-2)


def compare(kernel, reference, device, dtype, bound):
    """Outputs and gradients of all tokens and of some, by their largest errors relative to the reference's norm."""
    torch.manual_seed(0)
    attention = PlainOrFusedAttention(32, num_heads=2, qkv_bias=True).to(device, dtype)
    x = torch.randn(3, 20, 32).to(device, dtype).requires_grad_()
    ids = torch.stack([torch.randperm(20)[:7] for _ in range(3)]).to(device)

    def results(kernel):
        choose_attention(attention, device, kernel)
        whole, some = attention(x), attention.forward_queries(x, ids)
        return whole, some, *torch.autograd.grad(whole.square().sum() + some.sum(), [x, attention.qkv.weight])

    for result, expected in zip(results(kernel), results(reference), strict=True):
        assert (result - expected).float().norm() < bound * expected.float().norm()
    assert not attention.fused_attn  # by itself a CPU computes plain products


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_a_kernel_that_a_cpu_lacks_is_refused(kernel):
    with pytest.raises(InputError, match=f"^train.attention={kernel} needs a GPU"):
        choose_attention(PlainOrFusedAttention(8, num_heads=1), CPU, kernel)


@pytest.mark.parametrize("name", ["vit_rope", "SmallResNet"])
def test_a_network_with_another_attention_or_none_is_refused(name):
    network = (
        torch.nn.Linear(2, 2)
        if name == "SmallResNet"
        else torch.nn.Sequential(rope(), PlainOrFusedAttention(8, 1))
    )
    for kernel in ("plain", "flash"):
        with pytest.raises(InputError, match=f"^train.attention={kernel} is for"):
            choose_attention(network, CPU, kernel)
    choose_attention(network, CPU)


def rope():
    return timm.models.eva.EvaAttention(8, num_heads=2, norm_layer=torch.nn.LayerNorm)


@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed"])
def test_a_named_kernel_is_the_only_one(how, monkeypatch):
    """A CPU has none of this name: what is not computed by it is computed in silence."""
    monkeypatch.setitem(attention_module._BACKENDS, "flash", SDPBackend.EFFICIENT_ATTENTION)
    attention = PlainOrFusedAttention(8, num_heads=1, qkv_bias=True)
    choose_attention(attention, CPU, "flash")
    run = torch.compile(attention, backend="eager") if how == "compiled" else attention
    if how == "recomputed":
        run = partial(checkpoint, attention, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"(?i)no (available|viable) (kernel|backend)"):
        run(torch.zeros(1, 3, 8, requires_grad=True))
