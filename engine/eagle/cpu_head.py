"""An EAGLE-3 head on a CPU: all layers of a forward in one call of :mod:`engine.cpu.library`, or several draft levels.

Numbers between products are float32, whatever the weights are: so it may guess otherwise than :mod:`engine.eagle.head`
where two tokens are about as likely.

Tensor legend: N rows, D hidden size, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention import current_step
from engine.cpu.library import DTYPES, Library, find_library
from engine.cpu.rows import described
from engine.cpu.stack import CpuStack, RowLinear, obstacle, pack_head
from engine.eagle.head import EagleHead
from engine.layers.fused import ACTIVATIONS
from engine.layers.linear import has_tiles


class CpuHead(CpuStack):
    """All layers of a head and its final norm, in the place of its layers."""

    def __init__(self, head: EagleHead, library: Library) -> None:
        """Its weights are packed in place of the head's own."""
        first: Any = head.layers[0]
        super().__init__(head, library)
        state, embedding = first.hidden_norm, first.input_layernorm
        self.described.layers[0].input_norm = self._kept(state.weight)
        self.described.layers[0].input_eps = state.variance_epsilon
        self.described.embedding_norm = self._kept(embedding.weight)
        self.described.embedding_eps = embedding.variance_epsilon
        self.described.from_normed = head.config.norm_before_residual

    def states(self, embeddings_ND: Tensor, states_ND: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What is behind its last layer, before and after the norm, ``[N, D]`` each in float32, in a step's context.

        ``angles``: cosines and sines, ``[N, E]``.
        """
        step = current_step()
        self.reads(step.store)
        hidden_ND = states_ND.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        rows = described(step.rows, step.attention.page)
        return hidden_ND, self.compute(rows, hidden_ND, angles, embeddings_ND.float().contiguous())


def pack(head: EagleHead) -> CpuHead | None:
    """Have a head on a CPU compute from packed weights; returns what computes its layers, if that is the library.

    Where it is not there or does not know their sizes, each product is packed for itself.
    """
    if len(head.layers) and isinstance(head.layers[0], CpuHead):
        return head.layers[0]
    library, dtype = find_library(), head.norm.weight.dtype
    tiled = dtype == torch.bfloat16 and has_tiles()  # oneDNN's products are faster there
    layers: Any = head.layers
    known = dtype in DTYPES and all(type(layer.mlp.act_fn) in ACTIVATIONS for layer in layers)
    if library is None or tiled or not known or obstacle(head.config, library.width):
        pack_head(head)
        return None
    stack = CpuHead(head, library)
    head.layers, head.lm_head = nn.ModuleList(), RowLinear(library, head.lm_head)  # type: ignore[assignment]
    pack_head(head)
    head.layers.append(stack)
    return stack
