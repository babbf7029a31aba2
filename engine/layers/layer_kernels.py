"""What a decoder layer computes beside its matrix products and its attention: three operations on rows, in Triton.

A program computes a row, or a part of one that no other part takes part in, and is launched with what sizes of the
model say: neither its result nor its code depends on the number of rows, and a launch can be recorded. Sums are in
float32, and rounding is written out, where transformers' modules round; :data:`EXACT` keeps the compiler from
contracting it away. ``tests/plain_layers.py`` says the same in plain torch.

Only for use on CUDA: it imports Triton, which builds of torch for CPUs come without. With ``TRITON_INTERPRET=1`` set
before the import it also runs on a CPU, slowly.

Tensor legend: T tokens, D hidden size, Q query heads, H key/value heads, E head size, F = (Q + 2 H) E, S slots,
I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.attention.attention import current_step
from engine.layers.fused import Activation, FusedStack, Norm, SideBySide
from engine.layers.int8_kernels import Int8Product
from engine.layers.int8_linear import weights_alone

Pair = tuple[Tensor, Tensor]
Norms = tuple[Norm | None, Norm | None]
"""Of queries and of keys: both or none."""

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


class TritonOps:
    """The kernels. All tensors are contiguous; results are new ones."""

    dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})
    """Number formats that are computed."""

    def add_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum of both (the residual itself where there is no delta) and the sum normalised, each ``[T, D]``."""
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
        """Rotate queries and keys by their positions and write keys and values to their slots; return the queries.

        ``qkv_TF``: a token's query heads, then its key heads, then its value heads. ``angles``: cosines and sines,
        ``[T, E]``; both halves of a row are equal, and the halves of a head are rotated together, as Llama does.
        ``slots_T``: integers. ``cached``: all keys and values of the layer, ``[S, H, E]``. ``norms``: of each head
        before it is rotated. The queries are ``[T, Q, E]``.
        """
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
        """Linear layers of the same inputs as one product, side by side; None: they stay as they are.

        Their weights become views of the joined one.
        """
        known = all(type(part) is nn.Linear and weights_alone(part.weight) for part in parts)
        return Int8Product(parts) if known and len({part.bias is None for part in parts}) == 1 else None

    def gate(self, gate_up_T2I: Tensor, activation: Activation) -> Tensor:
        """The activated first half of each row times its second half, ``[T, I]``."""
        tokens, size = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
        out_TI = gate_up_T2I.new_empty(tokens, size)
        grid = (tokens, triton.cdiv(size, GATE_BLOCK))
        _gate[grid](gate_up_T2I, out_TI, size, GATE_BLOCK, activation == "silu", num_warps=4, **EXACT)
        return out_TI


class RowOpsStack(FusedStack):
    """Computed by products of torch and row operations of our own."""

    def __init__(self, stock: Any, ops: TritonOps) -> None:
        super().__init__(stock)
        self._ops = ops
        for layer in self.layers:
            for name in ("qkv", "output", "gate_up", "down"):
                product = getattr(layer, name)
                parts = product.parts if isinstance(product, SideBySide) else [product]
                setattr(layer, name, ops.product(list(parts)) or product)

    def forward(
        self,
        hidden_1TD: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """As transformers calls a decoder layer, with all tokens of the step in one row; ``[1, T, D]``."""
        assert len(hidden_1TD) == 1 and attention_mask is None, "a fused model computes packed steps only"
        ops, step = self._ops, current_step()
        angles = (position_embeddings[0][0], position_embeddings[1][0])
        residual_TD, delta_TD = hidden_1TD[0], None
        for index, layer in enumerate(self.layers):
            residual_TD, normed_TD = ops.add_norm(residual_TD, delta_TD, layer.input_norm)
            step.keep(index, residual_TD)
            cached = step.store.layer(index, layer.key_heads, layer.head_size, layer.head_size)
            norms = (layer.query_norm, layer.key_norm)
            query_TQE = ops.rotate_and_store(layer.qkv(normed_TD), angles, step.slots_T, cached, norms)
            found_TQE = step.attend(index, query_TQE, *cached, layer.scaling, layer.sliding_window)
            delta_TD = layer.output(found_TQE.flatten(1))
            residual_TD, normed_TD = ops.add_norm(residual_TD, delta_TD, layer.mlp_norm)
            delta_TD = layer.down(ops.gate(layer.gate_up(normed_TD), layer.activation))
        residual_TD, normed_TD = ops.add_norm(residual_TD, delta_TD, self.norm)
        step.keep(len(self.layers), residual_TD)
        return normed_TD[None]
