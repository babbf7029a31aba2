"""What the output layer of a model reads: the hidden states behind the final norm.

Tensor legend: R rows, D hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine.model import Model, ModelError


class HiddenTap:
    """Listens at the output layer of a model; keeps what it read last until somebody takes it."""

    def __init__(self, model: Model) -> None:
        """Listens from now on. Raises :class:`engine.model.ModelError` if there is nothing to listen to."""
        module: Any = model.module
        layer = module.get_output_embeddings()
        if layer is None:
            raise ModelError(f"model type {model.kind!r} has no output layer of its own whose input could be read")
        self.layer: nn.Module = layer
        self._read: Tensor | None = None
        # First of all hooks: another may hand the layer something that only it understands.
        layer.register_forward_pre_hook(self._note, prepend=True)

    def take(self) -> Tensor:
        """The hidden states of the rows that logits were computed for in the last forward, ``[..., R, D]``."""
        read, self._read = self._read, None
        assert read is not None, "the model did not call its output layer"
        return read

    def _note(self, _layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._read = given[0]
