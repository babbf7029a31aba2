"""What a target worker uses of an engine, whichever kind it is.

:class:`engine.step.Engine` computes trees of drafts over the slot cache; :class:`engine.stateful.StatefulEngine` runs a
model that takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.medusa import MedusaHeads
from engine.model import Model
from engine.parallel.group import RankError
from engine.step import Chunk

FATAL = (RankError, torch.AcceleratorError)
"""After these no step succeeds any more: a rank is lost, or the device fails whatever it is asked. The worker has to
end, so that it is started again; running out of memory is none of them."""


class StepEngine(Protocol):
    """Computes chunks of sequences of its ``cache``."""

    @property
    def model(self) -> Model:
        """What it runs."""

    @property
    def cache(self) -> KVCache:
        """Where its sequences come from."""

    @property
    def speculates(self) -> bool:
        """Whether chunks may be trees, and pending tokens be dropped at no cost."""

    @property
    def exactness(self) -> str:
        """See :attr:`speculation.messages.Welcome.exactness`."""

    @property
    def row_classes(self) -> Sequence[int]:
        """Numbers of rows that steps are padded to, ascending; empty: each computes as many as it has.

        What is added to a step within its class costs nothing on the device.
        """

    @property
    def forward_seconds(self) -> float:
        """How long the model itself took in the last step."""

    @property
    def heads(self) -> MedusaHeads | None:
        """What drafts from its hidden states, if anything."""

    @property
    def hidden(self) -> Tensor | None:
        """See :attr:`engine.step.Engine.hidden`."""

    @property
    def drawn(self) -> Tensor | None:
        """See :attr:`engine.step.Engine.drawn`."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute; see :meth:`engine.step.Engine.run`."""

    def close(self) -> None:
        """Let go of what it has beyond this process. The last call."""
