"""timm's attention with a plain path for short sequences, and the choice of its kernel.

Shapes: B batch, n tokens, m queries, D width, h heads, d = D / h width of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mae_vit.core.errors import InputError
from mae_vit.models.patches import take_tokens


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Turns autocast off, so that tensors keep their types. The meta device (cost estimates) has no autocast."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


class PlainOrFusedAttention(Attention):
    """timm's attention, with a plain path made for short sequences on a CPU.

    It has the same parameters and computes the same function. The fused paths take queries, keys and values as they
    lie in the projection; the plain one makes them contiguous by a single copy. There the softmax of bf16 stays in bf16
    (with float32 sums inside); autocast would convert to float32 and back.

    Attributes:
        kernel: that of fused attention, as `train.attention` names it.
    """

    kernel = "auto"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attends: (B, n, D) -> (B, n, D)."""
        if attn_mask is not None or is_causal:
            return super().forward(x, attn_mask, is_causal)
        batch, length, _ = x.shape
        packed = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim)  # (B, n, 3, h, d)
        return self.proj_drop(self.proj(self._mix(packed, None)))

    def forward_queries(self, x: Tensor, ids: Tensor) -> Tensor:
        """Attends from the tokens `ids` to all tokens: (B, n, D), int64 (B, m) -> (B, m, D)."""
        batch, length, _ = x.shape
        size, weight, bias = self.attn_dim, self.qkv.weight, self.qkv.bias
        q = F.linear(take_tokens(x, ids), weight[:size], bias[:size])  # (B, m, D)
        kv = F.linear(x, weight[size:], bias[size:])  # (B, n, 2D)
        heads = self.num_heads, self.head_dim
        mixed = self._mix(kv.view(batch, length, 2, *heads), q.view(batch, -1, *heads))
        return self.proj_drop(self.proj(mixed))

    def _mix(self, packed: Tensor, q: Tensor | None) -> Tensor:
        """Mixes values: q, k, v (B, n, 3, h, d), or k, v (B, n, 2, h, d) and q (B, m, h, d) -> (B, m, D)."""
        if not self.fused_attn:
            return self._mix_plainly(packed, q)
        parts = packed.unbind(2) if q is None else (q, *packed.unbind(2))
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, h, m or n, d)
        # Here, so that compiled code is of this kernel, and recomputed activations too.
        with sdpa_kernel(_BACKENDS[self.kernel]) if self.kernel in _BACKENDS else nullcontext():
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def _mix_plainly(self, packed: Tensor, q: Tensor | None) -> Tensor:
        parts = packed.permute(2, 0, 3, 1, 4).contiguous().unbind(0)  # (B, h, n, d) each
        q, k, v = parts if q is None else (q.transpose(1, 2).contiguous(), *parts)
        batch, heads, length, _ = q.shape
        with without_autocast(q):
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B*h, n, d) each
            scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=self.scale)
            mixed = torch.bmm(scores.softmax(dim=-1), v)  # (B*h, n, n) @ (B*h, n, d)
        return mixed.view(batch, heads, length, -1).transpose(1, 2).flatten(2)


# Kernels that a CPU lacks.
GPU_KERNELS = ("cudnn", "efficient")
# Kernels of PyTorch's fused attention, by the names of `train.attention`.
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def choose_attention(model: nn.Module, device: torch.device, kernel: str = "auto") -> None:
    """Chooses how a model computes attention on a device: `kernel` is a name of `train.attention`.

    "auto" is PyTorch's fused attention on GPUs, which on an H200 takes cuDNN's kernels (a step of B/16 takes 48.5 ms,
    and 51.0 with those of FlashAttention; docs/results/gpu), and plain products on CPUs: with AVX-512 at MAE's sequence
    lengths, a step with fused attention takes twice the time of a plain one in bf16, and 10 % more in fp32
    (benchmarks/step.py).

    Raises InputError for a kernel that the device or the model does not have.
    """
    set_fused_attention(model, is_fused(device, kernel))
    if device.type == "cpu" and kernel in GPU_KERNELS:
        raise InputError(f"train.attention={kernel} needs a GPU; a CPU has plain and flash")
    attending = [module for module in model.modules() if hasattr(module, "fused_attn")]
    ours = [module for module in attending if isinstance(module, PlainOrFusedAttention)]
    if kernel != "auto" and (not ours or len(ours) < len(attending)):
        raise InputError(f"train.attention={kernel} is for our Vision Transformers of the papers; use auto")
    for module in ours:
        module.kernel = kernel


def is_fused(device: torch.device, kernel: str) -> bool:
    """Returns whether attention is one kernel, without a matrix of scores in memory."""
    return device.type != "cpu" if kernel == "auto" else kernel != "plain"


def set_fused_attention(model: nn.Module, fused: bool) -> None:
    """Sets all attention modules to PyTorch's fused attention or to plain matmul-softmax-matmul: the same function."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused_attn = fused
