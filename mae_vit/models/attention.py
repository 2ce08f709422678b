"""timm's attention with a plain path, and the choice between fused and plain.

Shapes: B batch, n tokens, m queries, D width, h heads, d = D / h width of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from mae_vit.models.patches import take_tokens


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Turns autocast off, so that tensors keep their types. The meta device (cost estimates) has no autocast."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


class PlainOrFusedAttention(Attention):
    """timm's attention, with a plain path made for short sequences on a CPU.

    It has the same parameters and computes the same function. A single copy makes queries, keys
    and values contiguous. In bf16 the softmax stays in bf16 (with float32 sums inside); autocast
    would convert to float32 and back.
    """

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attends: (B, n, D) -> (B, n, D)."""
        if self.fused_attn or attn_mask is not None or is_causal:
            return super().forward(x, attn_mask, is_causal)
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim)  # (B, n, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous().unbind(0)  # (B, h, n, d) each
        return self._mix(q, k, v)

    def forward_queries(self, x: Tensor, ids: Tensor) -> Tensor:
        """Attends from the tokens `ids` to all tokens: (B, n, D), int64 (B, m) -> (B, m, D)."""
        batch, length, _ = x.shape
        size, weight, bias = self.attn_dim, self.qkv.weight, self.qkv.bias
        q = F.linear(take_tokens(x, ids), weight[:size], bias[:size])  # (B, m, D)
        q = q.view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2).contiguous()  # (B, h, m, d)
        kv = F.linear(x, weight[size:], bias[size:]).view(batch, length, 2, self.num_heads, self.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4).contiguous().unbind(0)  # (B, h, n, d) each
        if self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v)  # (B, h, m, d)
            return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return self._mix(q, k, v)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes plain attention of contiguous (B, h, n, d), and the output projection: -> (B, n, D)."""
        batch, heads, length, _ = q.shape
        with without_autocast(q):
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B*h, n, d) each
            scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=self.scale)
            mixed = torch.bmm(scores.softmax(dim=-1), v)  # (B*h, n, n) @ (B*h, n, d)
        return self.proj_drop(self.proj(mixed.view(batch, heads, length, -1).transpose(1, 2).flatten(2)))


def choose_attention(model: nn.Module, device: torch.device) -> None:
    """Chooses the faster attention for a device: PyTorch's fused one on GPUs, plain products on CPUs.

    On CPUs with AVX-512 at MAE's sequence lengths, a step with fused attention takes twice the
    time of a plain one in bf16, and 10 % more in fp32 (torch 2.15, benchmarks/step.py).
    """
    set_fused_attention(model, fused=device.type != "cpu")


def set_fused_attention(model: nn.Module, fused: bool) -> None:
    """Sets all attention modules to PyTorch's fused attention or to plain matmul-softmax-matmul: the same function."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused_attn = fused
