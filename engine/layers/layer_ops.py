"""What a decoder layer computes beside its matrix products and its attention: three operations on rows.

:class:`LayerOps` defines them in plain torch, rounding where transformers' modules round; a backend for a device
(:mod:`engine.layers.layer_kernels`) must agree. In all of them the bits of a row depend on that row alone, not on how
many there are. Decides nothing about which models are computed this way: that is :mod:`engine.layers.fused`'s.

Tensor legend: T tokens, D hidden size, Q query heads, H key/value heads, E head size, F = (Q + 2 H) E, S slots,
I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]
Pair = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """The weight of an RMSNorm over the last dimension, and what is added to the mean square.

    A normalised row is rounded to the weight's dtype, multiplied by it, and rounded to the row's own dtype. So one rule
    serves models that round before they multiply, as most do, and those that round after (float32 weights).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = float(eps)


Norms = tuple[Norm | None, Norm | None]
"""Of queries and of keys: both or none."""


class LayerOps:
    """The definition, on any device; a backend computes the same. All tensors are contiguous; results are new ones."""

    dtypes = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
    """Number formats it computes."""

    def add_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum of both (the residual itself where there is no delta) and the sum normalised, each ``[T, D]``."""
        sum_TD = residual_TD if delta_TD is None else residual_TD + delta_TD
        return sum_TD, _normalised(sum_TD, norm)

    def rotate_and_store(self, qkv_TF: Tensor, angles: Pair, slots_T: Tensor, cached: Pair, norms: Norms) -> Tensor:
        """Rotate queries and keys by their positions and write keys and values to their slots; return the queries.

        ``qkv_TF``: a token's query heads, then its key heads, then its value heads. ``angles``: cosines and sines,
        ``[T, E]``; both halves of a row are equal, and the halves of a head are rotated together, as Llama does.
        ``slots_T``: integers. ``cached``: all keys and values of the layer, ``[S, H, E]``. ``norms``: of each head
        before it is rotated. The queries are ``[T, Q, E]``.
        """
        (keys_SHE, values_SHE), (query_norm, key_norm) = cached, norms
        _, heads, size = keys_SHE.shape
        query_TQE, key_THE, value_THE = qkv_TF.view(len(qkv_TF), -1, size).tensor_split((-2 * heads, -heads), 1)
        if query_norm is not None and key_norm is not None:
            query_TQE, key_THE = _normalised(query_TQE, query_norm), _normalised(key_THE, key_norm)
        cos_T1E, sin_T1E = (each_TE[:, None] for each_TE in angles)
        keys_SHE.index_copy_(0, slots_T.long(), rotated(key_THE, cos_T1E, sin_T1E))
        values_SHE.index_copy_(0, slots_T.long(), value_THE)
        return rotated(query_TQE, cos_T1E, sin_T1E)

    def product(self, parts: Sequence[nn.Module]) -> nn.Module | None:
        """Linear layers of the same inputs as one product, side by side; None, as here: they stay as they are.

        Their weights may become views of the joined one.
        """
        del parts
        return None

    def gate(self, gate_up_T2I: Tensor, activation: Activation) -> Tensor:
        """The activated first half of each row times its second half, ``[T, I]``."""
        gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
        return (silu(gate_TI) if activation == "silu" else gelu(gate_TI, approximate="tanh")) * up_TI


def _normalised(rows: Tensor, norm: Norm) -> Tensor:
    precise = rows.float()
    precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (precise.to(norm.weight.dtype) * norm.weight).to(rows.dtype)


def rotated(heads_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    """Heads with their halves rotated together, as Llama does, ``[..., H, E]``."""
    left, right = heads_THE.chunk(2, -1)
    return heads_THE * cos_T1E + torch.cat((-right, left), -1) * sin_T1E
