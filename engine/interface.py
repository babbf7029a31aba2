"""What a target worker uses of an engine, whichever kind it is.

:class:`engine.step.Engine` computes trees of drafts over the slot cache; :class:`engine.stateful.StatefulEngine` runs a
model that takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.eagle.head import EagleHead
from engine.medusa import MedusaHeads
from engine.model import Model
from engine.parallel.group import RankError
from engine.sampling.sampling import Draw

FATAL = (RankError, torch.AcceleratorError)
"""After these no step succeeds any more: a rank is lost, or the device fails whatever it is asked. The worker has to
end, so that it is started again; running out of memory is none of them."""


class Chunk(NamedTuple):
    """Tokens to append to one sequence, and which of their logits are wanted.

    ``parents`` None continues the chain from the last pending node (or the prefix's end). Otherwise it holds an index
    per token in the sequence's pending numbering, where this chunk's tokens get the next free numbers, or -1.
    """

    sequence: CachedSequence
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    rows: Sequence[int] = ()
    """Indices into ``tokens``."""
    draws: Sequence[Draw] = ()
    """How a token is drawn on each of these, if all are plain draws; see :attr:`Engine.drawn`."""

    def resolved_parents(self) -> Sequence[int]:
        """The parents, spelled out."""
        if self.parents is None:
            pending = self.sequence.pending
            return range(pending - 1, pending - 1 + len(self.tokens))
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.parents)} parents for {len(self.tokens)} tokens")
        return self.parents


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
    def eagle(self) -> EagleHead | None:
        """What drafts from its auxiliary hidden states, if anything."""

    @property
    def hidden(self) -> Tensor | None:
        """See :attr:`engine.step.Engine.hidden`."""

    @property
    def aux(self) -> Tensor | None:
        """See :attr:`engine.step.Engine.aux`."""

    @property
    def drawn(self) -> Tensor | None:
        """See :attr:`engine.step.Engine.drawn`."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute; see :meth:`engine.step.Engine.run`."""

    def close(self) -> None:
        """Let go of what it has beyond this process. The last call."""
