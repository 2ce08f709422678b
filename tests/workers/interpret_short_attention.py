"""Compares the Triton kernels of attention, in Triton's interpreter, with the definition in float64.

Prints a JSON object: the largest relative error of output and gradients for each case of the command line,
N,M,HEADS,D,TYPE.
"""

import json
import os
import sys

# Triton reads it when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

import torch

from mae_vit.models.attention import PlainOrFusedAttention
from mae_vit.models.short_attention import short_attention


def difference(case: str) -> float:
    """The largest relative error of a case."""
    *sizes, name = case.split(",")
    n, m, heads, d = map(int, sizes)
    torch.manual_seed(0)
    packed = torch.randn(1, n, 3 if m == n else 2, heads, d)
    inputs = [packed] if m == n else [packed, torch.randn(1, m, heads, d)]
    inputs = [tensor.to(getattr(torch, name)).requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parts = exact[0].unbind(2) if m == n else (exact[1], *exact[0].unbind(2))
    q, k, v = (part.transpose(1, 2) for part in parts)
    expected = ((q @ k.transpose(2, 3) / d**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return largest(short_attention(*inputs), inputs, expected, exact)


def whole_module() -> float:
    """The largest relative error of a module, all tokens and some, against its plain path."""
    torch.manual_seed(0)
    module = PlainOrFusedAttention(32, num_heads=2, qkv_bias=True)
    x = torch.randn(3, 20, 32, requires_grad=True)
    ids = torch.stack([torch.randperm(20)[:7] for _ in range(3)])
    inputs, outputs = [x, module.qkv.weight], []
    for module.fused_attn, module.kernel in ((True, "triton"), (False, "auto")):
        outputs.append(torch.cat([module(x), module.forward_queries(x, ids)], dim=1))
    return largest(outputs[0], inputs, outputs[1], inputs)


def largest(mixed: torch.Tensor, inputs: list, expected: torch.Tensor, exact: list) -> float:
    """The largest relative error of outputs and of their gradients."""
    gradient = torch.randn(mixed.shape)
    results = [mixed, *torch.autograd.grad(mixed, inputs, gradient.to(mixed))]
    exactly = [expected, *torch.autograd.grad(expected, exact, gradient.to(mixed.dtype).to(expected))]
    pairs = zip(results, exactly, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


print(json.dumps({"module": whole_module(), **{case: difference(case) for case in sys.argv[1:]}}))
