"""The row operations of :mod:`engine.layers.layer_kernels` in plain torch, rounding where transformers' modules round.

Tensor legend: as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from engine.eagle.head import rotated
from engine.layers.fused import Activation, Norm

if TYPE_CHECKING:
    from engine.layers.layer_kernels import Norms, Pair


class PlainOps:
    """In the place of :class:`engine.layers.layer_kernels.TritonOps`, on any device."""

    dtypes = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

    def add_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """See :meth:`.TritonOps.add_norm`."""
        sum_TD = residual_TD if delta_TD is None else residual_TD + delta_TD
        return sum_TD, _normalised(sum_TD, norm)

    def rotate_and_store(self, qkv_TF: Tensor, angles: Pair, slots_T: Tensor, cached: Pair, norms: Norms) -> Tensor:
        """See :meth:`.TritonOps.rotate_and_store`."""
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
        """They stay as they are."""
        del parts
        return None

    def gate(self, gate_up_T2I: Tensor, activation: Activation) -> Tensor:
        """See :meth:`.TritonOps.gate`."""
        gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
        return (silu(gate_TI) if activation == "silu" else gelu(gate_TI, approximate="tanh")) * up_TI


def _normalised(rows: Tensor, norm: Norm) -> Tensor:
    precise = rows.float()
    precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (precise.to(norm.weight.dtype) * norm.weight).to(rows.dtype)
