"""What a model computes on the way: the states between its decoder layers.

A step that is recorded also makes of them what an EAGLE-3 head reads: that costs the host nothing then.

They are read by hooks where transformers computes the layers; where we do, the layers hand them to the step
(:meth:`engine.attention.attention.Step.keep`). They are written to memory that stays where it is, as a step that is
replayed needs it.

Tensor legend: T tokens, L layers asked for, D hidden size, E what is made of a token's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention import current_step
from engine.layers.fused import FusedStack
from engine.model import Model, ModelError


class LayerTap:
    """Auxiliary hidden states: of every token of a step, the states behind some decoder layers, before any norm."""

    def __init__(
        self, model: Model, layers: Sequence[int], rows: int, fuse: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """``layers``: behind how many decoder layers; 0: what the first one reads. ``rows``: see :meth:`room`.

        ``fuse``: what is made of the states of each token, ``[T, L * D] -> [T, E]``, and taken in their stead.
        Raises :class:`engine.model.ModelError` for other numbers, or a model that does not show its layers.
        """
        if wrong := [layer for layer in layers if not 0 <= layer <= model.layers]:
            raise ModelError(
                f"{model.name}: hidden states behind layer {wrong[0]} are asked for, it has {model.layers} layers; "
                f"each must be from 0 to {model.layers}"
            )
        self.layers = tuple(layers)
        size = model.config.get_text_config(decoder=True).hidden_size
        self._states_TLD = torch.zeros(rows, len(layers), size, dtype=model.dtype, device=model.device)
        self._fuse, self._fused_TE = fuse, torch.empty(0)
        self._read: list[Tensor] = []
        self._listen(model)

    def keep(self, layer: int, states_TD: Tensor) -> None:
        """Take in what stands behind so many layers, of all tokens that are computed at once."""
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                self.room(len(states_TD))[:, place].copy_(states_TD)

    def room(self, rows: int) -> Tensor:
        """Where the states of the forward in progress go, ``[T, L, D]``.

        It lies where it lay before as long as there are no more rows than there was room for at first.
        """
        if len(self._states_TLD) < rows:
            self._states_TLD = self._states_TLD.new_zeros(rows, *self._states_TLD.shape[1:])
        return self._states_TLD[:rows]

    def start(self) -> None:
        """A step begins: forget what was read and not taken."""
        self._read.clear()

    def fuse(self, rows: int) -> None:
        """The states of so many rows are there: make of them what is taken."""
        if self._fuse is None:
            return
        fused_TE = self._fuse(self._states_TLD[:rows].flatten(1))
        if len(self._fused_TE) < rows:
            self._fused_TE = fused_TE.new_zeros(len(self._states_TLD), fused_TE.shape[1])
        self._fused_TE[:rows].copy_(fused_TE)

    def computed(self, rows: int) -> None:
        """So many more tokens of the step have been computed."""
        states = self._states_TLD if self._fuse is None else self._fused_TE
        self._read.append(states[:rows].flatten(1).clone())

    def take(self) -> Tensor:
        """Of all tokens of the step, ``[T, L * D]``, or what was made of them, ``[T, E]``."""
        read, self._read = self._read, []
        return torch.cat(read) if len(read) > 1 else read[0]

    def _listen(self, model: Model) -> None:
        module: Any = model.module
        decoder = module.get_decoder() if hasattr(module, "get_decoder") else module.base_model
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"model type {model.kind!r} has no list of decoder layers whose states could be read")
        if isinstance(layers[0], FusedStack):
            return
        for wanted in set(self.layers):
            if wanted:
                layers[wanted - 1].register_forward_hook(partial(_keep, wanted))
            else:
                layers[0].register_forward_pre_hook(partial(_keep, wanted))


def _keep(layer: int, _layer: nn.Module, *seen: Tensor | tuple[Tensor, ...]) -> None:
    """Hand on what a decoder layer reads or, if that is seen as well, returns: ``[1, T, D]``, perhaps before others."""
    states = seen[-1]
    current_step().keep(layer, (states if isinstance(states, Tensor) else states[0])[0])
