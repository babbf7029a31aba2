"""The operations of :mod:`engine.layers.layer_ops` as Triton kernels, each beside the plain one it must equal.

A program computes a row, or a part of one that no other part takes part in, and is launched with what sizes of the
model say: neither its result nor its code depends on the number of rows, and a launch can be recorded. Sums are in
float32, and rounding is written out; :data:`EXACT` keeps the compiler from contracting it away.

Only for use on CUDA: it imports Triton, which builds of torch for CPUs come without. With ``TRITON_INTERPRET=1`` set
before the import it also runs on a CPU, slowly.

Tensor legend: as in :mod:`engine.layers.layer_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.layers.int8_kernels import Int8Product
from engine.layers.int8_linear import weights_alone
from engine.layers.layer_ops import Activation, LayerOps, Norm, Norms, Pair

GATE_BLOCK = 1024
"""Columns that a program of the gate computes."""

EXACT = {"enable_fp_fusion": False}
"""What every kernel is compiled with: a product is rounded before it is added, as in separate operations."""


@triton.jit
def _multiplied(precise, weight, dtype):
    """A normalised part of a row times the norm's weight, rounded as the weight's dtype says."""
    return (precise.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    start, d = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(x_ptr + start + d, mask=inside, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + start + d, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + start + d, x, mask=inside)
    precise = x.to(tl.float32)
    precise = precise * tl.rsqrt(tl.sum(precise * precise, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    tl.store(out_ptr + start + d, _multiplied(precise, weight, x.dtype), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, query_ptr, keys_ptr, values_ptr, query_weight_ptr, key_weight_ptr,
    query_eps, key_eps, Q: tl.constexpr, H: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A program is a head of a token, which it reads as two halves."""
    half: tl.constexpr = E // 2
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < half
    start = qkv_ptr + (t * (Q + 2 * H) + head) * E
    left, right = tl.load(start + d, mask=inside, other=0.0), tl.load(start + half + d, mask=inside, other=0.0)
    dtype: tl.constexpr = left.dtype
    slot = tl.load(slot_ptr + t).to(tl.int64)
    if head < Q:
        to, weight_ptr, eps = query_ptr + (t * Q + head) * E, query_weight_ptr, query_eps
    elif head < Q + H:
        to, weight_ptr, eps = keys_ptr + (slot * H + head - Q) * E, key_weight_ptr, key_eps
    else:
        to, weight_ptr, eps = values_ptr + (slot * H + head - Q - H) * E, key_weight_ptr, key_eps
    if head < Q + H:
        a, b = left.to(tl.float32), right.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / E + eps)
            left_weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
            right_weight = tl.load(weight_ptr + half + d, mask=inside, other=0.0)
            a = _multiplied(a * scale, left_weight, dtype).to(tl.float32)
            b = _multiplied(b * scale, right_weight, dtype).to(tl.float32)
        cos = tl.load(cos_ptr + t * E + d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * E + d, mask=inside, other=0.0).to(tl.float32)
        left = ((a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)).to(dtype)
        right = ((b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)).to(dtype)
    tl.store(to + d, left, mask=inside)
    tl.store(to + half + d, right, mask=inside)


@triton.jit
def _gate(gate_up_ptr, out_ptr, I: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr):  # noqa: E741
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    gate = tl.load(gate_up_ptr + t * 2 * I + i, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + t * 2 * I + I + i, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    # (1 + tanh(z / 2)) / 2 is the logistic function of z.
    z = x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    active = (x / (1.0 + tl.exp(-z))).to(gate.dtype)
    tl.store(out_ptr + t * I + i, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


class TritonOps(LayerOps):
    """The kernels."""

    dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})

    def add_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """See :meth:`engine.layers.layer_ops.LayerOps.add_norm`."""
        tokens, size = residual_TD.shape
        normed_TD = torch.empty_like(residual_TD)
        sum_TD = residual_TD if delta_TD is None else torch.empty_like(residual_TD)
        block = triton.next_power_of_2(size)
        _add_norm[(tokens,)](
            residual_TD, residual_TD if delta_TD is None else delta_TD, norm.weight, sum_TD, normed_TD, norm.eps,
            size, block, delta_TD is not None, num_warps=min(16, max(1, block // 512)), **EXACT,
        )  # fmt: skip
        return sum_TD, normed_TD

    def rotate_and_store(self, qkv_TF: Tensor, angles: Pair, slots_T: Tensor, cached: Pair, norms: Norms) -> Tensor:
        """See :meth:`engine.layers.layer_ops.LayerOps.rotate_and_store`."""
        _, heads, size = cached[0].shape
        tokens, all_heads = len(qkv_TF), qkv_TF.shape[1] // size
        queries = all_heads - 2 * heads
        query_TQE = qkv_TF.new_empty(tokens, queries, size)
        weights, eps = zip(*((qkv_TF, 0.0) if norm is None else (norm.weight, norm.eps) for norm in norms), strict=True)
        _rotate_and_store[(tokens, all_heads)](
            qkv_TF, *angles, slots_T, query_TQE, *cached, *weights, *eps,
            queries, heads, size, triton.next_power_of_2(size // 2), norms[0] is not None, num_warps=1, **EXACT,
        )  # fmt: skip
        return query_TQE

    def product(self, parts: Sequence[nn.Module]) -> nn.Module | None:
        """See :meth:`engine.layers.layer_ops.LayerOps.product`."""
        known = all(type(part) is nn.Linear and weights_alone(part.weight) for part in parts)
        return Int8Product(parts) if known and len({part.bias is None for part in parts}) == 1 else None

    def gate(self, gate_up_T2I: Tensor, activation: Activation) -> Tensor:
        """See :meth:`engine.layers.layer_ops.LayerOps.gate`."""
        tokens, size = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
        out_TI = gate_up_T2I.new_empty(tokens, size)
        grid = (tokens, triton.cdiv(size, GATE_BLOCK))
        _gate[grid](gate_up_T2I, out_TI, size, GATE_BLOCK, activation == "silu", num_warps=4, **EXACT)
        return out_TI
