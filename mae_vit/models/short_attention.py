"""Attention for short sequences on GPUs, as one Triton kernel each way.

Libraries are made for long sequences. MAE's have 17 to 257 tokens, so one program holds the keys and values of a head,
writes all gradients once, and reads and writes them in the layout of the q, k, v projection, without copies. The
computation is that of FlashAttention-2 (arXiv 2307.08691, Sec. 3.1): the backward pass computes the scores again.

Shapes: B batch, n tokens, m queries, h heads, d width of a head. Packed tensors are q, k, v of (B, n, 3, h, d), or k, v
of (B, n, 2, h, d); then the queries are (B, m, h, d).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Keys come in up to three chunks of at most this many.
_CHUNK = 128
MAX_TOKENS = 3 * _CHUNK
# Up to this length the gradients of all keys fit into the registers of four warps.
_NARROW = 80
# Tokens times channels of a head up to which its keys, values and tiles of 64 queries fit into shared memory.
_WIDE = 8192
_LOG2_E = 1.4426950408889634


@triton.jit
def _mask(rows, count, d: tl.constexpr, D: tl.constexpr):
    return (rows[:, None] < count) & (tl.arange(0, D)[None, :] < d)


@triton.jit
def _load(base, rows, stride, count, d: tl.constexpr, D: tl.constexpr):
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=_mask(rows, count, d, D), other=0.0)


@triton.jit
def _store(base, rows, stride, count, tile, d: tl.constexpr, D: tl.constexpr):
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=_mask(rows, count, d, D))


@triton.jit
def _mix(
    q,
    kv,
    stride,
    width,
    first,
    n,
    scale,
    most,
    total,
    mixed,
    d: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Adds a chunk of keys to the running maximum, sum and mean of values (Alg. 1)."""
    keys = first + tl.arange(0, N)
    scores = tl.dot(q, tl.trans(_load(kv, keys, stride, n, d, D))) * scale
    scores = tl.where(keys[None, :] < n, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    p, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
    v = _load(kv + width, keys, stride, n, d, D)
    return higher, total * shrink + tl.sum(p, 1), mixed * shrink[:, None] + tl.dot(p.to(q.dtype), v)


@triton.jit
def _forward(
    packed, queries, out, sums, n, m, scale, heads: tl.constexpr, parts: tl.constexpr,
    d: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = heads * d
    stride: tl.constexpr = parts * width
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows = tl.program_id(1) * M + tl.arange(0, M)
    packed += batch * n * stride + head * d
    if parts == 3:
        q = _load(packed, rows, stride, m, d, D)
    else:
        q = _load(queries + batch * m * width + head * d, rows, width, m, d, D)
    kv = packed + (parts - 2) * width
    most, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D), tl.float32)
    most, total, mixed = _mix(q, kv, stride, width, 0, n, scale, most, total, mixed, d, D, N1)
    if N2 > 0:
        most, total, mixed = _mix(q, kv, stride, width, N1, n, scale, most, total, mixed, d, D, N2)
    if N3 > 0:
        most, total, mixed = _mix(q, kv, stride, width, N1 + N2, n, scale, most, total, mixed, d, D, N3)
    _store(out + batch * m * width + head * d, rows, width, m, mixed / total[:, None], d, D)
    tl.store(sums + tl.program_id(0).to(tl.int64) * m + rows, most + tl.log2(total), mask=rows < m)


@triton.jit
def _differentiate_chunk(q, do, logs, dots, k, v, keys, n, scale, scale2, dq, dk, dv):
    """Adds the gradients of a tile of queries and a chunk of keys (Alg. 2)."""
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale2 - logs[:, None])
    p = tl.where(keys[None, :] < n, p, 0.0)
    dv += tl.dot(tl.trans(p.to(do.dtype)), do)
    ds = (p * (tl.dot(do, tl.trans(v)) - dots[:, None]) * scale).to(q.dtype)
    return dq + tl.dot(ds, k), dk + tl.dot(tl.trans(ds), q), dv


@triton.jit
def _backward(
    packed, queries, out, sums, grad, d_packed, d_queries, n, m, scale, scale2,
    heads: tl.constexpr, parts: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = heads * d
    stride: tl.constexpr = parts * width
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    packed += batch * n * stride + head * d
    d_packed += batch * n * stride + head * d
    out += batch * m * width + head * d
    grad += batch * m * width + head * d
    sums += tl.program_id(0).to(tl.int64) * m
    kv, dkv = packed + (parts - 2) * width, d_packed + (parts - 2) * width
    keys1 = tl.arange(0, N1)
    k1, v1 = _load(kv, keys1, stride, n, d, D), _load(kv + width, keys1, stride, n, d, D)
    dk1, dv1 = tl.zeros((N1, D), tl.float32), tl.zeros((N1, D), tl.float32)
    if N2 > 0:
        keys2 = N1 + tl.arange(0, N2)
        k2, v2 = _load(kv, keys2, stride, n, d, D), _load(kv + width, keys2, stride, n, d, D)
        dk2, dv2 = tl.zeros((N2, D), tl.float32), tl.zeros((N2, D), tl.float32)
    if N3 > 0:
        keys3 = N1 + N2 + tl.arange(0, N3)
        k3, v3 = _load(kv, keys3, stride, n, d, D), _load(kv + width, keys3, stride, n, d, D)
        dk3, dv3 = tl.zeros((N3, D), tl.float32), tl.zeros((N3, D), tl.float32)
    for first in range(0, m, M):
        rows = first + tl.arange(0, M)
        if parts == 3:
            q = _load(packed, rows, stride, m, d, D)
        else:
            q = _load(queries + batch * m * width + head * d, rows, width, m, d, D)
        do = _load(grad, rows, width, m, d, D)
        dots = tl.sum(do.to(tl.float32) * _load(out, rows, width, m, d, D).to(tl.float32), 1)
        logs = tl.load(sums + rows, mask=rows < m, other=0.0)
        dq = tl.zeros((M, D), tl.float32)
        dq, dk1, dv1 = _differentiate_chunk(q, do, logs, dots, k1, v1, keys1, n, scale, scale2, dq, dk1, dv1)
        if N2 > 0:
            dq, dk2, dv2 = _differentiate_chunk(
                q, do, logs, dots, k2, v2, keys2, n, scale, scale2, dq, dk2, dv2
            )
        if N3 > 0:
            dq, dk3, dv3 = _differentiate_chunk(
                q, do, logs, dots, k3, v3, keys3, n, scale, scale2, dq, dk3, dv3
            )
        if parts == 3:
            _store(d_packed, rows, stride, m, dq, d, D)
        else:
            _store(d_queries + batch * m * width + head * d, rows, width, m, dq, d, D)
    _store(dkv, keys1, stride, n, dk1, d, D)
    _store(dkv + width, keys1, stride, n, dv1, d, D)
    if N2 > 0:
        _store(dkv, keys2, stride, n, dk2, d, D)
        _store(dkv + width, keys2, stride, n, dv2, d, D)
    if N3 > 0:
        _store(dkv, keys3, stride, n, dk3, d, D)
        _store(dkv + width, keys3, stride, n, dv3, d, D)


def _chunks(n: int) -> tuple[int, int, int]:
    """Cuts n keys into at most three powers of two from 16, with little over; those not needed are 0."""
    chunks = [_CHUNK] * (n // _CHUNK)
    left = n % _CHUNK
    if left:
        power = max(16, triton.next_power_of_2(left))
        half, end = power // 2, max(16, triton.next_power_of_2(left - power // 2))
        chunks += [half, end] if len(chunks) < 2 and end < half else [power]
    first, second, third = [*chunks, 0, 0][:3]
    return first, second, third


def _options(packed: Tensor, m: int, *, backward: bool = False) -> dict[str, int]:
    """Returns what a kernel is compiled for. Tiles and warps are our guess: no GPU has measured them."""
    _, n, parts, heads, d = packed.shape
    n1, n2, n3 = _chunks(n)
    channels = max(16, triton.next_power_of_2(d))
    # Wider tiles need more shared memory than GPUs such as an RTX 4090 have.
    most = 32 if backward and n * channels > _WIDE else 64
    tile, warps = min(most, max(16, triton.next_power_of_2(m))), 8 if backward and n > _NARROW else 4
    shapes = {"heads": heads, "parts": parts, "d": d, "D": channels, "M": tile, "N1": n1, "N2": n2, "N3": n3}
    return {**shapes, "num_warps": warps, "num_stages": 1}


def _count(packed: Tensor, queries: Tensor) -> int:
    """Returns m."""
    return queries.shape[1] if packed.shape[2] == 2 else packed.shape[1]


@triton_op("mae_vit::short_attention", mutates_args={})
def _attend(packed: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mixed values (B, m, h * d), and log2 of the sums of exponentials, float32 (B, h, m)."""
    batch, n, _, heads, d = packed.shape
    m = _count(packed, queries)
    out, sums = packed.new_empty(batch, m, heads * d), packed.new_empty(batch, heads, m, dtype=torch.float32)
    options = _options(packed, m)
    wrap_triton(_forward)[(batch * heads, triton.cdiv(m, options["M"]))](
        packed, queries, out, sums, n, m, d**-0.5 * _LOG2_E, **options
    )
    return out, sums


@triton_op("mae_vit::short_attention_backward", mutates_args={})
def _attend_backward(
    packed: Tensor, queries: Tensor, out: Tensor, sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `packed` and `queries`."""
    batch, n, _, heads, d = packed.shape
    m = _count(packed, queries)
    d_packed, d_queries = torch.empty_like(packed), torch.empty_like(queries)
    wrap_triton(_backward)[(batch * heads,)](
        packed, queries, out, sums, grad, d_packed, d_queries, n, m, d**-0.5, d**-0.5 * _LOG2_E,
        **_options(packed, m, backward=True),
    )  # fmt: skip
    return d_packed, d_queries


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return _attend_backward(*ctx.saved_tensors, grad.contiguous())


_attend.register_autograd(_differentiate, setup_context=_save)


def short_attention(packed: Tensor, queries: Tensor | None = None) -> Tensor:
    """Attends with softmax(q k^T / sqrt(d)) to at most `MAX_TOKENS` keys: contiguous tensors -> (B, m, h * d)."""
    return _attend(packed, packed.new_empty(0) if queries is None else queries)[0]
